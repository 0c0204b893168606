// Trains on the digits and shows loss, accuracy on unseen digits, and time per step.

import { Batches, asBatch, sampleDigits } from "./digits.js";
import { open } from "./trainer.js";

const [UNSEEN, BATCH, RATE] = [359, 32, 1e-3];
const $ = (id) => document.getElementById(id);
const bytes = async (name) => new Uint8Array(await (await fetch(name)).arrayBuffer());
const [module, state] = await Promise.all([bytes("trainer.wasm"), bytes("state.bin")]);
const manifest = await (await fetch("manifest.json")).json();
const trainer = await open(module, manifest, state);
const { train, unseen } = await sampleDigits("digits.bin", UNSEEN);
const batches = new Batches(train);
const labelled = ({ x, target }) => ({ x, target: target.map(BigInt) });

/** Train for `count` steps; return the last loss and the time per step in ms. */
globalThis.trainFor = (count) => {
  const began = performance.now();
  let loss;
  for (let i = 0; i < count; i++)
    ({ loss } = trainer.call("step", { ...labelled(batches.next(false)), learning_rate: RATE }));
  return { loss, ms: (performance.now() - began) / count };
};

/** Return the accuracy on all full batches of unseen digits. */
globalThis.accuracy = () => {
  const shares = [];
  for (let i = 0; i + BATCH <= UNSEEN; i += BATCH)
    shares.push(trainer.call("evaluate", labelled(asBatch(unseen.slice(i, i + BATCH)))).accuracy);
  return shares.reduce((sum, share) => sum + share, 0) / shares.length;
};

let [training, steps] = [false, 0];
$("size").textContent = `${(module.length / 1000).toFixed(1)} KB`;
$("start").disabled = false;
$("start").addEventListener("click", async () => {
  training = !training;
  $("start").textContent = training ? "Stop" : "Go on";
  while (training) {
    const { loss, ms } = trainFor(5);
    steps += 5;
    const right = (100 * accuracy()).toFixed(1);
    $("told").textContent =
      `${steps} steps, ${ms.toFixed(1)} ms each; loss ${loss.toFixed(3)}; ${right} % of new digits right`;
    await new Promise((done) => setTimeout(done));
  }
});

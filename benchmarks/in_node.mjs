// Trains a step in onnxruntime-node, and says what that takes, as in_a_tab.mjs does of a tab:
//
//     node in_node.mjs STEP ONNXRUNTIME THREADS STEPS
//
// What it prints as "trained" and "written" is the peak of the process's memory, in bytes.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { load } from "../examples/web/gradgraph.js";

const [step, onnxruntime, threads, steps] = process.argv.slice(2);
const { default: ort } = await import(pathToFileURL(onnxruntime));
const batch = JSON.parse(readFileSync(join(step, "batch.json"), "utf8"));
const seconds = [];
const losses = [];
const trainer = await load(`${step}/`, { ort, sessionOptions: { intraOpNumThreads: Number(threads) } });
for (let i = 0; i < Number(steps); i++) {
  const before = process.cpuUsage();
  losses.push((await trainer.step(batch)).loss);
  const { user, system } = process.cpuUsage(before);
  seconds.push((user + system) / 1e6);
}
const peak = () => [process.resourceUsage().maxRSS * 1024];
const trained = peak();
await trainer.predict({ ids: batch.ids });
console.log(JSON.stringify({ losses, seconds, trained, written: peak() }));

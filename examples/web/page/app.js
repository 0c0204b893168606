// The user interface of the page; training itself is in gradgraph.js.

import { Chart, picture } from "./charts.js";
import { BATCH, Batches, asBatch, sampleDigits } from "./digits.js";
import { Drawing, asPixels } from "./drawing.js";
import { bestProvider, load } from "./gradgraph/gradgraph.js";

const UNSEEN = 359; // the number of held-out sample digits
const SHOWN = 24; // the number of held-out digits on the page
const FRAME = 24; // ms of training between two updates of the page
const LOOK = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1500 : 250; // ms between two evaluations
const SCRIPTS = { wasm: "ort.wasm.min.mjs", webgpu: "ort.webgpu.min.mjs" };
const $ = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;
const frame = () => new Promise((done) => setTimeout(done));

const charts = {
  loss: new Chart($("loss-chart"), { say: "Loss", format: (value) => value.toFixed(2) }),
  accuracy: new Chart($("accuracy-chart"), {
    say: "Accuracy",
    top: 1,
    format: (value) => `${Math.round(100 * value)}\u00a0%`,
  }),
};
const batches = new Batches([]);
let trainer, unseen;
let training = false;
let run = Promise.resolve(); // the current training

function say(text, wrong = false) {
  $("message").textContent = text;
  $("message").classList.toggle("wrong", wrong);
}

/** Run `action` when a button is clicked; show its errors on the page. */
const onClick = (id, action) =>
  $(id).addEventListener("click", () => action().catch((error) => say(error.message, true)));

// --- onnxruntime ----------------------------------------------------------------------------------------------------

/** Make the page work offline, by its service worker. */
async function keepOffline() {
  if (!navigator.serviceWorker) return;
  await navigator.serviceWorker.register("service-worker.js");
  const kept = navigator.serviceWorker.ready.then(
    () =>
      navigator.serviceWorker.controller ??
      new Promise((done) => navigator.serviceWorker.addEventListener("controllerchange", done, { once: true })),
  );
  const waited = new Promise((_, late) => setTimeout(late, 8000, new Error("it did not start")));
  await Promise.race([kept, waited]);
}

/** Open a trainer on a provider, whose onnxruntime is loaded first if it was not used before. */
async function opened(provider) {
  const ort = await import(`./ort/${SCRIPTS[provider]}`);
  ort.env.wasm.wasmPaths = new URL("ort/", document.baseURI).href;
  ort.env.wasm.numThreads = 1; // the network is too small for several threads
  ort.env.logLevel = "error";
  const made = await load(`steps/${provider}`, { ort, executionProviders: [provider] });
  const state = await made.state();
  await made.step(batches.next(false)); // so that a provider that cannot run the step fails here
  await made.setState(state);
  made.steps = 0;
  return made;
}

/** Switch to `provider`, keeping the training state; fall back to WebAssembly if WebGPU fails. */
async function compute(provider) {
  const state = trainer && (await trainer.checkpoint());
  let made, refused;
  try {
    made = await opened(provider);
  } catch (error) {
    if (provider === "wasm") throw error;
    [provider, refused] = ["wasm", error];
    made = await opened("wasm");
  }
  if (state) await made.restore(state);
  await trainer?.dispose();
  trainer = made;
  $("provider").value = provider;
  $("device").textContent = provider === "webgpu" ? "Computes with WebGPU" : "Computes with WebAssembly";
  if (refused) say(`WebGPU does not work here (${refused.message.slice(0, 120)}), so the page uses WebAssembly.`);
}

// --- training -------------------------------------------------------------------------------------------------------

async function train() {
  training = true;
  $("start").textContent = "Stop";
  say("Training…");
  let [looked, drawn, counted] = [0, performance.now(), trainer.steps];
  try {
    while (training) {
      const alone = $("source").value === "own";
      if (alone && !batches.own.length)
        throw new Error("Draw a digit and label it first, or train on the sample digits, too.");
      const { loss } = await trainer.step(batches.next(alone), { learning_rate: rate() });
      charts.loss.add(trainer.steps, loss);
      const now = performance.now();
      if (now - drawn < FRAME) continue;
      if (now - looked > LOOK) {
        $("speed").textContent = looked ? Math.round((1000 * (trainer.steps - counted)) / (now - looked)) : "–";
        $("loss").textContent = loss.toFixed(3);
        charts.loss.paint();
        await look();
        [looked, counted] = [performance.now(), trainer.steps];
      }
      await frame();
      drawn = performance.now();
    }
    say(`Stopped after ${trainer.steps} steps, in epoch ${batches.epoch}.`);
  } finally {
    training = false;
    $("start").textContent = trainer.steps ? "Go on" : "Start training";
    charts.loss.paint();
    await look();
  }
}

const rate = () => 10 ** Number($("rate").value);

/** Evaluate the network on the held-out digits and on the drawing, and show the results. */
async function look() {
  const { accuracy } = await trainer.evaluate(asBatch(unseen));
  charts.accuracy.add(trainer.steps, accuracy);
  charts.accuracy.paint();
  $("accuracy").textContent = percent(accuracy);
  $("steps").textContent = trainer.steps;
  const scores = await guesses(unseen.slice(0, SHOWN).map((image) => image.pixels));
  const fit = scores.filter((shares, i) => {
    const tile = $("unseen").children[i];
    const said = best(shares);
    const fits = said === unseen[i].digit;
    tile.className = fits ? "right" : "wrong";
    tile.querySelector("span").textContent = fits ? `${said} ✓` : `${said} ✗`;
    tile.setAttribute("aria-label", `a ${unseen[i].digit}, taken for a ${said}`);
    return fits;
  });
  $("unseen-right").textContent = `${fit.length} of these ${SHOWN} are right, ${percent(accuracy)} of all ${UNSEEN}.`;
  await guess();
}

/** Return the probabilities of the ten digits for each image. */
async function guesses(images) {
  const { x } = asBatch(images.map((pixels) => ({ pixels, digit: 0 })));
  const { data } = (await trainer.predict({ x })).logits;
  return images.map((_, i) => {
    const row = [...data.subarray(10 * i, 10 * i + 10)].map((value, _, all) => Math.exp(value - Math.max(...all)));
    const sum = row.reduce((a, b) => a + b);
    return row.map((value) => value / sum);
  });
}

const best = (shares) => shares.indexOf(Math.max(...shares));

/** Show the prediction for the drawing. */
async function guess() {
  const empty = !drawing.strokes.length;
  const shares = trainer && !empty ? (await guesses([asPixels(drawing.strokes)]))[0] : new Array(10).fill(0);
  const first = empty || !trainer ? -1 : best(shares);
  $("guess").textContent = first < 0 ? "nothing yet" : `a ${first} (${percent(shares[first])})`;
  [...$("bars").children].forEach((row, digit) => {
    row.classList.toggle("best", digit === first);
    row.querySelector("i").style.transform = `scaleX(${shares[digit]})`;
    row.querySelector(".share").textContent = percent(shares[digit]);
  });
}

// --- drawings -------------------------------------------------------------------------------------------------------

const drawing = new Drawing($("canvas"), {
  changed: () => trainer && guess().catch((error) => say(error.message, true)),
  labelled,
  say: (text) => ($("pen").textContent = text),
});

function labelled(digit) {
  if (!drawing.strokes.length) return say("Draw something first, then say what it is.", true);
  const image = { pixels: asPixels(drawing.strokes), digit };
  batches.own.push(image);
  const tile = document.createElement("li");
  const remove = Object.assign(document.createElement("button"), { type: "button", textContent: `${digit} ✕` });
  remove.setAttribute("aria-label", `Remove this ${digit}`);
  remove.addEventListener("click", () => {
    batches.own.splice(batches.own.indexOf(image), 1);
    tile.remove();
    $("own-count").textContent = batches.own.length;
    $("canvas").focus();
  });
  tile.append(picture(image.pixels), remove);
  $("own").append(tile);
  $("own-count").textContent = batches.own.length;
  drawing.clear();
  say(`Added a ${digit}: ${batches.own.length} of your own.`);
}

// --- files ----------------------------------------------------------------------------------------------------------

function download(name, bytes) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([bytes], { type: "application/octet-stream" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  say(`Saved ${name} (${Math.ceil(bytes.length / 1024)} KB).`);
}

async function take(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (file.name.endsWith(".onnx")) await trainer.loadWeights(bytes);
  else await trainer.restore(bytes);
  await look();
  say(`Loaded ${file.name}: ${$("accuracy").textContent} of new digits are right. Go on from here.`);
}

// --- the page -------------------------------------------------------------------------------------------------------

function fill() {
  for (let digit = 0; digit < 10; digit++) {
    const row = document.createElement("li");
    const bar = '<span class="bar" aria-hidden="true"><i></i></span>';
    row.innerHTML = `<span>${digit}</span>${bar}<span class="share"></span>`;
    $("bars").append(row);
    const label = Object.assign(document.createElement("button"), { type: "button", textContent: digit });
    label.setAttribute("aria-label", `Add the drawing as a ${digit}`);
    label.addEventListener("click", () => labelled(digit));
    $("labels").append(label);
  }
  for (const { pixels, digit } of unseen.slice(0, SHOWN)) {
    const tile = document.createElement("li");
    tile.setAttribute("aria-label", `a ${digit}`);
    tile.append(picture(pixels), document.createElement("span"));
    $("unseen").append(tile);
  }
}

function wire() {
  onClick("start", async () => {
    if (training) training = false;
    else await (run = train());
  });
  onClick("reset", async () => {
    training = false;
    await run.catch(() => {});
    await trainer.reset();
    Object.values(charts).forEach((chart) => chart.clear());
    $("start").textContent = "Start training";
    await look();
    say("The network knows nothing again.");
  });
  onClick("clear", async () => drawing.clear());
  onClick("sample", async () => drawing.copy(unseen[Math.floor(Math.random() * UNSEEN)].pixels));
  onClick("save", async () => download("trained.onnx", await trainer.exportModel()));
  onClick("checkpoint", async () => download("digits.ckpt", await trainer.checkpoint()));
  $("open").addEventListener("change", ({ target }) => {
    const [file] = target.files;
    if (file) take(file).catch((error) => say(`${file.name}: ${error.message}`, true));
    target.value = ""; // so that the same file can be loaded again
  });
  $("rate").addEventListener("input", () => ($("rate-value").textContent = rate().toPrecision(2)));
  $("provider").addEventListener("change", async ({ target }) => {
    target.disabled = true;
    await compute(target.value).catch((error) => say(error.message, true));
    target.disabled = false;
  });
  for (const id of ["start", "reset", "sample", "save", "checkpoint", "open"]) $(id).disabled = false;
}

async function start() {
  const offline = keepOffline().then(
    () => ($("offline").textContent = navigator.serviceWorker ? "Works offline from here on" : "Needs the network"),
    () => ($("offline").textContent = "Needs the network"),
  );
  const { train: samples, unseen: held } = await sampleDigits("digits.bin", UNSEEN);
  [batches.samples, unseen] = [samples, held];
  fill();
  await guess();
  await offline; // files that onnxruntime loads are cached only after the service worker has started
  const has = await bestProvider();
  if (has === "wasm") $("provider").querySelector("[value=webgpu]").disabled = true;
  await compute(new URLSearchParams(location.search).get("provider") ?? has);
  await look();
  wire();
  if (!$("message").textContent) say(`Ready: batches of ${BATCH} digits, of ${samples.length} to learn from.`);
}

start().catch((error) => say(`This page cannot start: ${error.message}`, true));

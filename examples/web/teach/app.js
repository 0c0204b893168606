// The user interface of the page; training is in gradgraph.js, tokenizing and generation in chat.js.

import { pageBytes, wasmBytes } from "./memory.js";
import * as stored from "./stored.js";
import { Template } from "@huggingface/jinja";
import { Tokenizer } from "@huggingface/tokenizers";
import { Chart } from "../charts.js";
import { batchesOf, openChat, rowsOf } from "../gradgraph/chat.js";
import { bestProvider, load } from "../gradgraph/gradgraph.js";

const SCRIPTS = { wasm: "ort.wasm.min.mjs", webgpu: "ort.webgpu.min.mjs" };
const DEVICES = { wasm: "WebAssembly", webgpu: "WebGPU" };
const STEP_FILES = ["manifest.json", "train.onnx", "init.onnx", "eval.onnx", "init.bin", "frozen.bin"];
const TEXT_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];
const TINY = ["manifest.json", "train.onnx", "init.onnx", "eval.onnx", ...TEXT_FILES];
const STATE = "state.ckpt";
const FRAME = 24; // ms of computing before the page gets a turn
const LOOK = 1000; // ms between two rounds of sample answers, at least
const SHARE = 0.2; // the largest share of training time for sample answers
const PATIENCE = 3000; // ms for a round of sample answers; an unfinished answer ends in …
const [SHOWN, LONGEST] = [4, 48]; // the number of sample answers, and the most tokens of an answer
const $ = (id) => document.getElementById(id);
const megabytes = (bytes) => `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)}\u00a0MB`;
const frame = () => new Promise((done) => setTimeout(done));
const rate = () => 10 ** Number($("rate").value);

const chart = new Chart($("loss-chart"), { say: "Loss", format: (value) => value.toFixed(2) });
let trainer, chat, samples;
let training = false;
let run = Promise.resolve(); // the current training
let opening = Promise.resolve(); // the model being opened
let epoch = 0;
let losses = [];
let breathed = 0; // the time of the page's last turn

/** Let the browser update the page, if the last update was more than FRAME ms ago. */
async function breathe() {
  if (performance.now() - breathed < FRAME) return;
  await frame();
  breathed = performance.now();
}

function say(text, wrong = false) {
  $("message").textContent = text;
  $("message").classList.toggle("wrong", wrong);
}

/** Run `action` on an event of a control; show its errors on the page. */
const on = (id, event, action) =>
  $(id).addEventListener(event, (happened) => action(happened).catch((error) => say(error.message, true)));

// --- the model ------------------------------------------------------------------------------------------------------

async function runtime(provider) {
  const ort = await import(`../ort/${SCRIPTS[provider]}`);
  ort.env.wasm.wasmPaths = new URL("../ort/", document.baseURI).href;
  ort.env.logLevel = "error";
  return ort;
}

/** Open the model that is stored in the browser. */
async function open(title) {
  const { backend, optimizer } = JSON.parse(new TextDecoder().decode(await stored.bytes("manifest.json")));
  const provider = backend === "web-gpu" ? await bestProvider() : "wasm";
  const made = await load(stored.bytes, { ort: await runtime(provider), executionProviders: [provider] });
  const opened = await openChat(stored.bytes, { Tokenizer, Template });
  await made.exportAdapter(); // so that a step without adapters is rejected here
  await trainer?.dispose();
  [trainer, chat, epoch, losses] = [made, opened, 0, []];
  if (await stored.has(STATE)) await trainer.restore(await stored.bytes(STATE));
  const learnt = trainer.manifest.state.filter((s) => s.kind === "parameter");
  const count = learnt.reduce((sum, { shape }) => sum + shape.reduce((a, b) => a * b, 1), 0);
  const where = title ?? (await stored.bytes("title").then((bytes) => new TextDecoder().decode(bytes)));
  $("model").textContent =
    `${where}: ${count.toLocaleString("en")} numbers in ${learnt.length} tensors are trained with ${optimizer.name}.`;
  $("device").textContent = `Computes with ${DEVICES[provider]}`;
  await show();
}

async function show() {
  chart.clear();
  $("steps").textContent = trainer.steps;
  $("loss").textContent = $("speed").textContent = "–";
  $("start").textContent = trainer.steps ? "Go on" : "Start training";
  await showMemory();
  if (readExamples()) await write();
}

async function useTiny() {
  const files = await Promise.all(
    TINY.map(async (name) => {
      const response = await fetch(`model/${name}`);
      if (!response.ok) throw new Error(`cannot load model/${name} (${response.status}); make the page again`);
      return [name, await response.blob()];
    }),
  );
  const title = "The tiny model of this page, 4 bits a weight, a token for each character";
  await stored.keepAll({ ...Object.fromEntries(files), title });
  await open(title);
  say("Ready.");
}

/** Store the needed files of a folder: the step and the tokenizer that are nearest to its top. */
async function pick(files) {
  const depth = (file) => file.webkitRelativePath.split("/").length;
  const highest = (name) => files.filter((f) => f.name === name).sort((a, b) => depth(a) - depth(b))[0];
  const kept = {};
  for (const [first, names] of [STEP_FILES, TEXT_FILES].map((all) => [all[0], all])) {
    const found = highest(first);
    if (!found) throw new Error(`the folder has no ${first}; pick a folder with a step and the model's tokenizer`);
    const folder = found.webkitRelativePath.slice(0, -first.length);
    for (const file of files) if (names.some((n) => file.webkitRelativePath === folder + n)) kept[file.name] = file;
  }
  const title = `The folder ${files[0].webkitRelativePath.split("/")[0]}`;
  say(`Storing ${megabytes(Object.values(kept).reduce((sum, { size }) => sum + size, 0))} in the browser…`);
  await stored.keepAll({ ...kept, title });
  await open(title);
  say("Ready.");
}

async function showMemory() {
  $("stored").textContent = `Kept in this browser: ${megabytes(await stored.size())}`;
  const shown = (all) => {
    const wasm = wasmBytes();
    const whole = all > wasm ? `${megabytes(all)}, of it ` : ""; // an older measurement may be smaller
    $("memory").textContent = `Memory: ${whole}WebAssembly ${megabytes(wasm)}`;
  };
  shown();
  pageBytes().then(shown); // measuring takes a while
}

// --- examples -------------------------------------------------------------------------------------------------------

/** Read and tokenize the examples; return whether they are valid. */
function readExamples() {
  try {
    const rows = rowsOf($("examples").value);
    samples = chat.encode(rows);
    samples.forEach((sample, i) => (sample.prompt = promptOf(rows[i])));
    const counted = samples.flatMap(({ learnt }) => learnt.slice(1)).filter(Boolean).length;
    const all = samples.reduce((sum, { ids }) => sum + ids.length, 0);
    $("counted").textContent = `${samples.length} examples of ${all} tokens; ${counted} of them are trained on.`;
    $("preview").replaceChildren(...samples.slice(0, 3).map(preview));
    return true;
  } catch (error) {
    samples = undefined;
    $("counted").textContent = error.message;
    $("preview").replaceChildren();
    return false;
  }
}

/** Return the prompt of a row: everything before its last answer; for a text, its first words. */
function promptOf(row) {
  if (row.kind === "messages") return row.messages.slice(0, -1);
  return row.kind === "prompt" ? row.prompt : row.text.split(" ").slice(0, 3).join(" ");
}

/** Return a list item with the text of a row, in which the parts that are trained on are marked. */
function preview({ ids, learnt }) {
  const line = document.createElement("li");
  let from = 0;
  for (let i = 1; i <= ids.length; i++) {
    if (i < ids.length && learnt[i] === learnt[from]) continue;
    const piece = document.createElement(learnt[from] ? "mark" : "span");
    piece.textContent = chat.tokenizer.decode(ids.slice(from, i), { clean_up_tokenization_spaces: false });
    line.append(piece);
    from = i;
  }
  return line;
}

// --- training -------------------------------------------------------------------------------------------------------

async function train() {
  if (!samples) throw new Error(`the examples are not valid: ${$("counted").textContent}`);
  training = true;
  $("start").textContent = "Stop";
  $("examples").readOnly = true;
  say("Training…");
  let [looked, tokens, pause] = [performance.now(), 0, LOOK];
  try {
    while (training) {
      const options = { batchSize: Number($("batch").value), pad: chat.pad, seed: epoch };
      for (const batch of batchesOf(samples, trainer.manifest, options)) {
        const { loss } = await trainer.step(batch, { learning_rate: rate() });
        losses.push([trainer.steps, loss]);
        chart.add(trainer.steps, loss);
        tokens += Object.values(batch)[0].data.length;
        const now = performance.now();
        if (now - looked > pause) {
          $("speed").textContent = Math.round((1000 * tokens) / (now - looked));
          await look(loss);
          [looked, tokens] = [performance.now(), 0];
          pause = Math.max(LOOK, (looked - now) * (1 / SHARE - 1));
        }
        await breathe();
        if (!training) break;
      }
      epoch += 1;
    }
    await stored.keep(STATE, await trainer.checkpoint());
    say(`Stopped after ${trainer.steps} steps. The training state is stored in this browser.`);
  } finally {
    training = false;
    $("examples").readOnly = false;
    $("start").textContent = trainer.steps ? "Go on" : "Start training";
    if (losses.length) await look(losses.at(-1)[1]);
  }
}

async function look(loss) {
  $("steps").textContent = trainer.steps;
  $("loss").textContent = loss.toFixed(3);
  chart.paint();
  await write();
  await showMemory();
}

/** Show the model's answers to the first examples, as far as they are finished within PATIENCE ms. */
async function write() {
  const end = performance.now() + PATIENCE;
  const shown = samples.slice(0, SHOWN);
  const lines = shown.map(({ prompt }) => {
    const line = document.createElement("li");
    const asked = typeof prompt === "string" ? prompt : prompt.at(-1).content;
    line.append(
      Object.assign(document.createElement("span"), { className: "asked", textContent: asked }),
      Object.assign(document.createElement("span"), { className: "said" }),
    );
    return line;
  });
  for (const [i, { prompt }] of shown.entries()) {
    const inTime = () => performance.now() < end;
    const onToken = async () => {
      await breathe();
      return inTime();
    };
    const text = inTime() ? await chat.answer(trainer, prompt, { maxTokens: LONGEST, onToken }) : "";
    lines[i].lastChild.textContent = inTime() ? text : `${text}…`;
  }
  $("samples").replaceChildren(...lines);
}

/** Show the answer to the question while it is generated. */
async function ask() {
  const ids = [];
  const onToken = async (id) => {
    ids.push(id);
    $("answer").textContent = chat.decode(ids);
    await frame();
  };
  $("ask").disabled = true;
  $("answer").textContent = "";
  try {
    $("answer").textContent = await chat.answer(trainer, $("question").value, { maxTokens: LONGEST, onToken });
  } finally {
    $("ask").disabled = false;
  }
}

// --- files ----------------------------------------------------------------------------------------------------------

function download(name, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type: "application/octet-stream" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

async function take(files) {
  const given = await Promise.all(files.map(async (f) => [f.name, new Uint8Array(await f.arrayBuffer())]));
  const [[name, bytes]] = given;
  await trainer.loadAdapter(name.endsWith(".onnx_adapter") ? bytes : Object.fromEntries(given));
  await write();
  say(`Loaded ${given.map(([file]) => file).join(" and ")}. Go on from here.`);
}

// --- the page -------------------------------------------------------------------------------------------------------

function wire() {
  on("start", "click", async () => {
    await opening.catch(() => {}); // its error is already shown
    if (training) training = false;
    else await (run = train());
  });
  on("reset", "click", async () => {
    await stopped();
    await trainer.reset();
    await stored.forget(STATE);
    [epoch, losses] = [0, []];
    await show();
    say("The model is as it was.");
  });
  on("tiny", "click", async () => {
    await stopped();
    await (opening = useTiny());
  });
  on("folder", "change", async ({ target }) => {
    await stopped();
    if (target.files.length) await (opening = pick([...target.files]));
  });
  on("examples", "change", async () => {
    stored.keepExamples($("examples").value);
    if (readExamples()) await write();
  });
  on("ask", "click", ask);
  on("peft", "click", async () => {
    const family = $("family").value || undefined;
    for (const [name, content] of Object.entries(await trainer.exportAdapter({ family }))) download(name, content);
  });
  on("onnx-adapter", "click", async () =>
    download("adapter.onnx_adapter", await trainer.exportAdapter({ format: "onnx_adapter" })),
  );
  on("losses", "click", async () => download("losses.csv", ["step,loss", ...losses.map(String), ""].join("\n")));
  on("open", "change", async ({ target }) => {
    const files = [...target.files];
    target.value = ""; // so that the same files can be loaded again
    if (files.length) await take(files);
  });
  $("rate").addEventListener("input", () => ($("rate-value").textContent = rate().toPrecision(2)));
  for (const control of document.querySelectorAll(":disabled")) control.disabled = false;
}

async function stopped() {
  training = false;
  await run.catch(() => {});
}

async function start() {
  $("examples").value = stored.examples() ?? (await (await fetch("examples.jsonl")).text());
  if (await stored.has("title")) {
    await open();
    say(trainer.steps ? `Ready, from step ${trainer.steps} of the last visit.` : "Ready.");
  } else await useTiny();
  wire();
}

start().catch((error) => say(`This page cannot start: ${error.message}`, true));

// Trains a step in a tab of headless Chromium, and says what that takes:
//
//     node in_a_tab.mjs STEP PACKAGES THREADS STEPS
//
// STEP is a step folder with batch.json in it. Prints {"losses", "seconds" of processor time, "trained", "written"} as JSON,
// the last two the bytes of WebAssembly and of the page, after steps and after a prediction besides.

import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { launch, serve } from "../tests/runtimes/chromium.mjs";

const [step, packages, threads, steps] = process.argv.slice(2);
const web = fileURLToPath(new URL("../examples/web", import.meta.url));
const folders = { "/ort/": join(packages, "onnxruntime-web", "dist"), "/web/": web, "/step/": step, "/": web };
const [server, address] = await serve(folders);
const browser = await launch(packages);
const browserSession = await browser.newBrowserCDPSession();
const page = await browser.newPage();
page.setDefaultTimeout(0);
await page.goto(`${address}/`);
await page.evaluate(async (threads) => {
  globalThis.memory = await import("/web/teach/memory.js");
  const ort = await import("/ort/ort.wasm.min.mjs");
  const { load } = await import("/web/gradgraph.js");
  ort.env.wasm.numThreads = threads;
  globalThis.trainer = await load("/step/", { ort });
  globalThis.batch = await (await fetch("/step/batch.json")).json();
}, Number(threads));
const losses = [];
const ends = [await processorTime()];
for (let i = 0; i < Number(steps); i++) {
  losses.push(await page.evaluate(async () => (await trainer.step(batch)).loss));
  ends.push(await processorTime());
}
const seconds = losses.map((_, i) => ends[i + 1] - ends[i]);
const look = () => page.evaluate(async () => [memory.wasmBytes(), await memory.pageBytes()]);
const trained = await look();
await page.evaluate(() => trainer.predict({ ids: batch.ids }));
console.log(JSON.stringify({ losses, seconds, trained, written: await look() }));
await browser.close();
server.close();

/** Of all processes that pages have, in seconds. */
async function processorTime() {
  const { processInfo } = await browserSession.send("SystemInfo.getProcessInfo");
  return processInfo.filter(({ type }) => type === "renderer").reduce((sum, { cpuTime }) => sum + cpuTime, 0);
}

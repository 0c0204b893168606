// Trains step folders and runs models in headless Chromium, with onnxruntime-web:
//
//     node browser.mjs JOBS PACKAGES PROVIDER
//
// JOBS is a folder with jobs.json, a list of
//     {"step": folder, "batches": [{name: tensor}], "options": {}}     trains on each batch in turn
//     {"model": file, "feeds": {name: tensor}}                         runs a model
// with paths inside JOBS and tensors as {"dtype", "dims", "bytes" (base64)}. PACKAGES is the node_modules with
// onnxruntime-web and playwright-core. PROVIDER is wasm, webgpu (onnxruntime's native one) or jsep (in JavaScript).
// Prints a JSON line for each job: {"losses": [...]}, {"outputs": {name: tensor}} or {"error": sentence}. The
// environment variable CHROMIUM is the path of the browser, if it is not in a usual place.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { launch, serve } from "./chromium.mjs";

const LONGEST = 590_000; // ms for one job
const SCRIPTS = { wasm: "ort.wasm.min.mjs", webgpu: "ort.webgpu.min.mjs", jsep: "ort.min.mjs" };

const [folder, packages, provider] = process.argv.slice(2);
const jobs = JSON.parse(readFileSync(join(folder, "jobs.json"), "utf8"));
const [server, address] = await serve({
  "/ort/": join(packages, "onnxruntime-web", "dist"),
  "/gradgraph/": fileURLToPath(new URL("../../examples/web", import.meta.url)),
  "/": folder,
});
const browser = await launch(packages, { webgpu: provider !== "wasm" });

/** Open a page with onnxruntime-web and the library. A runtime may stay broken after an error, which needs a new page. */
async function opened() {
  const page = await browser.newPage();
  page.on("console", (message) => process.stderr.write(`${message.text()}\n`));
  await page.goto(`${address}/`);
  await page.evaluate(
    async ([script, provider]) => {
      globalThis.ort = await import(`/ort/${script}`);
      globalThis.gradgraph = await import("/gradgraph/gradgraph.js");
      ort.env.wasm.numThreads = 1;
      globalThis.provider = provider;
      globalThis.tensor = ({ dtype, dims, bytes }) => {
        if (dtype === "str") return new ort.Tensor("string", bytes, dims);
        const data = Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0)).buffer;
        const arrays = { float32: Float32Array, float64: Float64Array, int64: BigInt64Array, uint64: BigUint64Array };
        const more = {
          int32: Int32Array,
          uint32: Uint32Array,
          int16: Int16Array,
          uint16: Uint16Array,
          int8: Int8Array,
        };
        const Typed = { ...arrays, ...more, float16: globalThis.Float16Array ?? Uint16Array }[dtype] ?? Uint8Array;
        return new ort.Tensor(dtype, new Typed(data), dims);
      };
      globalThis.plain = async (tensor) => {
        const data = await tensor.getData();
        if (tensor.type === "string") return { dtype: "str", dims: [...tensor.dims], bytes: data };
        const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
        const text = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
        return { dtype: tensor.type, dims: [...tensor.dims], bytes: btoa(text) };
      };
    },
    [SCRIPTS[provider], provider],
  );
  return page;
}

const train = async ({ step, batches, options }) => {
  const executionProviders = [provider === "jsep" ? "webgpu" : provider];
  const trainer = await gradgraph.load(`/${step}`, { ort, executionProviders, checkLoss: false, ...options });
  const losses = [];
  for (const batch of batches) {
    const fed = Object.fromEntries(Object.entries(batch).map(([name, value]) => [name, tensor(value)]));
    losses.push((await trainer.step(fed)).loss);
  }
  await trainer.dispose();
  return { losses };
};

const run = async ({ model, feeds }) => {
  const executionProviders = [provider === "jsep" ? "webgpu" : provider];
  const session = await ort.InferenceSession.create(`/${model}`, { executionProviders });
  const fed = Object.fromEntries(Object.entries(feeds).map(([name, value]) => [name, tensor(value)]));
  const results = await session.run(fed);
  const outputs = {};
  for (const [name, value] of Object.entries(results)) outputs[name] = await plain(value);
  await session.release();
  return { outputs };
};

let page;
for (const job of jobs) {
  let line, timer;
  try {
    page ??= await opened();
    const late = new Promise(
      (_, no) => (timer = setTimeout(() => no(new Error(`not done in ${LONGEST / 1000} s`)), LONGEST)),
    );
    line = await Promise.race([page.evaluate(job.step ? train : run, job), late]);
  } catch (error) {
    line = {
      error: String(error.message ?? error)
        .replace(/^page\.evaluate: (\w*Error: )?/, "")
        .split("\n    at ")[0],
    };
    await page?.close();
    page = undefined;
  }
  clearTimeout(timer);
  console.log(
    JSON.stringify(line, (_, value) => (typeof value === "number" && !Number.isFinite(value) ? null : value)),
  );
}
await browser.close();
server.close();

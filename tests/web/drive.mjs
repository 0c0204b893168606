// Calls a trainer's methods one after another, for tests in Python:
//
//     node drive.mjs LIBRARY ONNXRUNTIME job.json
//
// job.json: {"folder": ..., "options": {...}, "calls": [[method, argument, ...], ...]}; an argument {"file": path} is
// the bytes of a file. Prints a JSON line for each call: {"result": ...}, {"bytes": path} or {"error", "message"}.

import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [library, onnxruntime, job] = process.argv.slice(2);
const { load } = await import(pathToFileURL(library));
const { default: ort } = await import(pathToFileURL(onnxruntime));
const { folder, options, calls } = JSON.parse(readFileSync(job, "utf8"));

const plain = (key, value) =>
  ArrayBuffer.isView(value)
    ? Array.from(value, Number)
    : typeof value === "number" && !Number.isFinite(value)
      ? String(value)
      : value;
const given = (value) => (typeof value?.file === "string" ? new Uint8Array(readFileSync(value.file)) : value);

let trainer, saved;
for (const [number, [method, ...args]] of calls.entries()) {
  let line;
  try {
    if (method === "load") {
      const source = folder.files
        ? Object.fromEntries(folder.files.map((f) => [f, new Uint8Array(readFileSync(`${folder.in}/${f}`))]))
        : folder;
      trainer = await load(source, { ort, ...options });
      line = { result: null };
    } else if (method === "keep") {
      saved = await trainer.state();
      line = { result: saved };
    } else if (method === "goBack") {
      line = { result: await trainer.setState(saved) };
    } else {
      const result = await trainer[method](...args.map(given));
      if (result instanceof Uint8Array) writeFileSync(`${job}.${number}`, result);
      line = result instanceof Uint8Array ? { bytes: `${job}.${number}` } : { result: result ?? null };
    }
  } catch (error) {
    line = { error: error.name, message: error.message };
  }
  console.log(JSON.stringify({ steps: trainer?.steps, ...line }, plain));
}

// Calls a trainer's methods one after another, for tests in Python:
//
//     node drive.mjs LIBRARY ONNXRUNTIME job.json
//
// job.json contains {"folder": ..., "options": {...}, "calls": [[method, argument, ...], ...]}. An argument
// {"file": path} stands for the bytes of a file, {"folder": path} for the bytes of all its files by name. The method
// "generate" is the function of chat.js. Prints a JSON line for each call: {"result": ...}, {"bytes": path of a file or
// a folder} or {"error", "message"}.

import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [library, onnxruntime, job] = process.argv.slice(2);
const { load } = await import(pathToFileURL(library));
const { generate } = await import(new URL("chat.js", pathToFileURL(library)));
const { default: ort } = await import(pathToFileURL(onnxruntime));
const { folder, options, calls } = JSON.parse(readFileSync(job, "utf8"));

const plain = (key, value) =>
  ArrayBuffer.isView(value)
    ? Array.from(value, Number)
    : typeof value === "number" && !Number.isFinite(value)
      ? String(value)
      : value;
// as Node.js reads small files: a view at any offset of a larger buffer, whose slice() does not copy
const read = (path) => Buffer.concat([Buffer.of(1, 2, 3), readFileSync(path)]).subarray(3);
const given = (value) =>
  typeof value?.file === "string"
    ? read(value.file)
    : typeof value?.folder === "string"
      ? Object.fromEntries(readdirSync(value.folder).map((name) => [name, read(`${value.folder}/${name}`)]))
      : value;
const areFiles = (result) => result && Object.values(result).every((value) => value instanceof Uint8Array);

function kept(path, result) {
  if (result instanceof Uint8Array) writeFileSync(path, result);
  else {
    mkdirSync(path);
    Object.entries(result).forEach(([name, bytes]) => writeFileSync(`${path}/${name}`, bytes));
  }
  return { bytes: path };
}

let trainer, saved;
for (const [number, [method, ...args]] of calls.entries()) {
  let line;
  try {
    if (method === "load") {
      const source = folder.files
        ? Object.fromEntries(folder.files.map((f) => [f, read(`${folder.in}/${f}`)]))
        : folder;
      trainer = await load(source, { ort, ...options });
      line = { result: null };
    } else if (method === "keep") {
      saved = await trainer.state();
      line = { result: saved };
    } else if (method === "generate") {
      line = { result: await generate(trainer, ...args) };
    } else if (method === "goBack") {
      line = { result: await trainer.setState(saved) };
    } else {
      const result = await trainer[method](...args.map(given));
      const isBytes = result instanceof Uint8Array || areFiles(result);
      line = isBytes ? kept(`${job}.${number}`, result) : { result: result ?? null };
    }
  } catch (error) {
    line = { error: error.name, message: error.message };
  }
  console.log(JSON.stringify({ steps: trainer?.steps, ...line }, plain));
}

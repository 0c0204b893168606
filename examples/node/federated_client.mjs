// A federated training client in JavaScript, which could also run in a browser:
//
//     node federated_client.mjs step/ data/
//
// data/ contains <name>.npy for each input and target, one row per sample, written by numpy.save. Each line of standard
// input is a round: {"weights": {name: base64 of float32}, "batches": [[row, …], …], "proximal": mu}. The answer is
// a line with the weights after these batches and the mean loss, or {"error": …}. examples/federated/ drives it.

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { load } from "gradgraph";
import ort from "onnxruntime-node";

const ARRAYS = { "<f4": Float32Array, "<f8": Float64Array, "<i4": Int32Array, "<i8": BigInt64Array };
const TRAVELS = ["parameter", "statistic"];

const [folder, files] = process.argv.slice(2);
const trainer = await load(folder, { ort });
const { state: specs, inputs, targets, hyperparameters } = trainer.manifest;
const weights = specs.filter((s) => TRAVELS.includes(s.kind));
const other = weights.find((s) => s.dtype !== "float32");
if (other) throw new Error(`'${other.name}' is ${other.dtype}; this client trains steps with weights in float32`);
const columns = [...inputs, ...targets].map((spec) => (columnOf(spec.name)));

/** Read an array written by numpy.save: a text header, then the numbers row by row. */
function columnOf(name) {
  const bytes = readFileSync(`${files}/${name}.npy`);
  const begin = 10 + bytes.readUInt16LE(8);
  const header = bytes.toString("latin1", 10, begin);
  const Typed = ARRAYS[header.match(/'descr': '(.+?)'/)?.[1]];
  if (!Typed || header.includes("True"))
    throw new Error(`${name}.npy has the header ${header}, which this client does not support`);
  const dims = header.match(/\(([\d, ]*)\)/)[1].split(",").filter((size) => size.trim()).map(Number);
  const values = new Typed(bytes.buffer.slice(bytes.byteOffset + begin, bytes.byteOffset + bytes.length));
  return { name, values, dims: dims.slice(1), size: values.length / dims[0] };
}

function batchOf(rows) {
  const taken = ({ name, values, size, dims }) => {
    const data = new values.constructor(rows.length * size);
    rows.forEach((row, i) => data.set(values.subarray(row * size, (row + 1) * size), i * size));
    return [name, { data, dims: [rows.length, ...dims] }];
  };
  return Object.fromEntries(columns.map(taken));
}

/** Apply the proximal term of FedProx, mu / 2 |w - w_received|²: an SGD step towards the received parameters. */
async function pulled(before, came, mu) {
  const after = await trainer.state();
  for (const { name } of weights.filter((s) => s.kind === "parameter"))
    after[name].data = after[name].data.map(
      (w, i) => w - hyperparameters.learning_rate * mu * (before[name].data[i] - came[name].data[i]),
    );
  await trainer.setState(after);
  return after;
}

async function round({ weights: sent, batches, proximal }) {
  await trainer.reset();
  let state = await trainer.state();
  for (const { name } of weights) {
    const bytes = Buffer.from(sent[name], "base64");
    state[name].data = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
  }
  await trainer.setState(state);
  const came = Object.fromEntries(weights.map(({ name }) => [name, { data: state[name].data.slice() }]));
  let total = 0;
  for (const rows of batches) {
    total += (await trainer.step(batchOf(rows))).loss;
    if (proximal) state = await pulled(state, came, proximal);
  }
  state = await trainer.state();
  const base64 = ({ data }) => Buffer.from(data.buffer, data.byteOffset, data.byteLength).toString("base64");
  return {
    weights: Object.fromEntries(weights.map(({ name }) => [name, base64(state[name])])),
    loss: total / batches.length,
  };
}

for await (const line of createInterface({ input: process.stdin })) {
  const answer = await round(JSON.parse(line)).catch((error) => ({ error: error.message }));
  console.log(JSON.stringify(answer));
}
await trainer.dispose();

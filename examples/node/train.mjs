// Trains a gradgraph step folder with nothing but "run a model":
//
//     node train.mjs step/ batches.json [epochs]
//
// batches.json is a list of batches; a batch maps each input's name to {"dims": [...], "data": [...]}.
// Prints one JSON line per step.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import ort from "onnxruntime-node";

const ARRAYS = { float32: Float32Array, float64: Float64Array, int32: Int32Array, int64: BigInt64Array };

function tensor(dtype, { dims, data }) {
  const convert = dtype === "int64" ? BigInt : Number;
  return new ort.Tensor(dtype, ARRAYS[dtype].from(data.flat(Infinity), convert), dims);
}

const [folder, batchesFile, epochs = "1"] = process.argv.slice(2);
const manifest = JSON.parse(readFileSync(join(folder, "manifest.json"), "utf8"));
const batches = JSON.parse(readFileSync(batchesFile, "utf8"));
const dtypes = Object.fromEntries([...manifest.inputs, ...manifest.targets].map((s) => [s.name, s.dtype]));

const init = await ort.InferenceSession.create(join(folder, "init.onnx"));
const train = await ort.InferenceSession.create(join(folder, "train.onnx"));

let state = await init.run({}); // parameters, statistics, optimizer slots and counters, by name
const rates = Object.fromEntries(
  Object.entries(manifest.hyperparameters).map(([k, v]) => [k, new ort.Tensor("float32", [v], [])]),
);

for (let epoch = 0; epoch < Number(epochs); epoch++) {
  for (const batch of batches) {
    const feeds = Object.fromEntries(Object.entries(batch).map(([name, value]) => [name, tensor(dtypes[name], value)]));
    const results = await train.run({ ...feeds, ...rates, ...state });
    state = Object.fromEntries(manifest.state.map((s) => [s.name, results[s.next]]));
    console.log(JSON.stringify({ loss: Number(results[manifest.loss_output].data[0]) }));
  }
}

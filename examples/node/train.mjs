// Trains a gradgraph step folder with nothing but "run a model":
//
//     node train.mjs step/ batches.json [epochs]
//
// batches.json is a list of batches; a batch maps each input's name to {"dims": [...], "data": [...]}.
// Prints one JSON line per step. A folder with several named steps trains each of them on each batch.

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
const state = await init.run({}); // parameters, statistics, optimizer slots and counters, by name

// of a step that is the only one, the manifest says itself what it is
const steps = [];
for (const [name, part] of Object.entries(manifest.steps ?? { "": manifest })) {
  const train = await ort.InferenceSession.create(join(folder, name ? `train.${name}.onnx` : "train.onnx"));
  const rates = Object.entries(part.hyperparameters).map(([k, v]) => [k, new ort.Tensor("float32", [v], [])]);
  const moved = manifest.state.filter((s) => !name || part.writes.includes(s.name));
  steps.push({ name, train, rates: Object.fromEntries(rates), moved, lossOutput: part.loss_output });
}

for (let epoch = 0; epoch < Number(epochs); epoch++) {
  for (const batch of batches) {
    const feeds = Object.fromEntries(Object.entries(batch).map(([name, value]) => [name, tensor(dtypes[name], value)]));
    for (const { name, train, rates, moved, lossOutput } of steps) {
      const all = { ...feeds, ...rates, ...state };
      const results = await train.run(Object.fromEntries(train.inputNames.map((input) => [input, all[input]])));
      for (const s of moved) state[s.name] = results[s.next];
      console.log(JSON.stringify({ ...(name && { step: name }), loss: Number(results[lossOutput].data[0]) }));
    }
  }
}

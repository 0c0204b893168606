// Trains a step folder with onnxruntime-node, without a library (one for Node.js and browsers is ../web/gradgraph.js):
//
//     npm install onnxruntime-node && node train.mjs run/step run/
//
// It does the same as train.c (see docs/how-to/loops.md).

import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import ort from "onnxruntime-node";

const BATCH = 16;
const EPOCHS = 5;
const ARRAYS = { float32: Float32Array, int64: BigInt64Array };

const [folder, data] = process.argv.slice(2);
const manifest = JSON.parse(readFileSync(join(folder, "manifest.json"), "utf8"));
const open = (name) => ort.InferenceSession.create(join(folder, `${name}.onnx`));
const [init, train, evaluate] = await Promise.all(["init", "train", "eval"].map(open));

const columns = [...manifest.inputs, ...manifest.targets].map(({ name, dtype, shape }) => {
  const bytes = readFileSync(join(data, `${name}.bin`));
  const numbers = new ARRAYS[dtype](bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
  return { name, dtype, numbers, sizes: shape.slice(1), width: shape.slice(1).reduce((a, b) => a * b, 1) };
});
const rows = columns[0].numbers.length / columns[0].width;
if (columns.some(({ numbers, width }) => numbers.length !== rows * width))
  throw new Error("the inputs and targets have different numbers of rows");

const batch = (begin) =>
  Object.fromEntries(columns.map(({ name, dtype, numbers, sizes, width }) => {
    const part = numbers.slice(begin * width, (begin + BATCH) * width);
    return [name, new ort.Tensor(dtype, part, [BATCH, ...sizes])];
  }));
const pick = (session, feeds) => Object.fromEntries(session.inputNames.map((name) => [name, feeds[name]]));

const rates = Object.fromEntries(
  Object.entries(manifest.hyperparameters).map(([name, rate]) => [name, new ort.Tensor("float32", [rate], [])]),
);
let state = await init.run({});

for (let epoch = 0; epoch < EPOCHS; epoch++) {
  for (let begin = 0; begin + BATCH <= rows; begin += BATCH) {
    const found = await train.run(pick(train, { ...batch(begin), ...rates, ...state }));
    state = Object.fromEntries(manifest.state.map(({ name, next }) => [name, found[next]]));
    console.log(found[manifest.loss_output].data[0].toFixed(6));
  }
}
const averages = Object.entries(manifest.averages ?? {}).map(([name, average]) => [name, state[average]]);
const used = { ...state, ...Object.fromEntries(averages) };
const found = await evaluate.run(pick(evaluate, { ...batch(0), ...used }));
console.log(`eval ${found[manifest.loss_output].data[0].toFixed(6)}`);

const weights = manifest.state.filter(({ kind }) => kind === "parameter").map(({ name }) => used[name].data);
writeFileSync(join(data, "weights.bin"), Buffer.concat(weights.map((w) => Buffer.from(w.buffer, w.byteOffset, w.byteLength))));

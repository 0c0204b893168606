// Trains the head of a frozen network in Node.js; the frozen layers run once for each sample:
//
//     gradgraph build network.onnx --train 'head.*' --split-frozen -o parts/
//     node train_head.mjs parts/ batches.json [epochs] [head.onnx]
//
// batches.json is a list of batches for the whole network, as in train.mjs. Prints one JSON line per step. head.onnx is
// the trained head, which reads the outputs of parts/features.onnx.

import { readFileSync, writeFileSync } from "node:fs";
import { load } from "gradgraph";
import ort from "onnxruntime-node";

const [folder, batchesFile, epochs = "1", trained] = process.argv.slice(2);
const batches = JSON.parse(readFileSync(batchesFile, "utf8"));
const frozen = await ort.InferenceSession.create(`${folder}/features.onnx`);
const trainer = await load(`${folder}/step`, { ort });
const read = [...trainer.manifest.inputs, ...trainer.manifest.targets].map(({ name }) => name);

const arrays = { float32: Float32Array, int64: BigInt64Array, int32: Int32Array, uint8: Uint8Array, bool: Uint8Array };
const tensor = ({ name, type }, { data, dims }) =>
  new ort.Tensor(type, arrays[type].from(data, type === "int64" ? BigInt : Number), dims ?? [data.length]);

const kept = [];
for (const batch of batches) {
  const features = await frozen.run(
    Object.fromEntries(frozen.inputMetadata.map((input) => [input.name, tensor(input, batch[input.name])])),
  );
  const every = { ...batch, ...features };
  kept.push(Object.fromEntries(read.map((name) => [name, every[name]])));
}
await frozen.release();

for (let epoch = 0; epoch < Number(epochs); epoch++)
  for (const batch of kept) console.log(JSON.stringify({ loss: (await trainer.step(batch)).loss }));
if (trained) writeFileSync(trained, await trainer.exportModel());
await trainer.dispose();

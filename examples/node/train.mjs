// Trains a gradgraph step folder in Node.js:
//
//     node train.mjs step/ batches.json [epochs] [trained.onnx]
//
// batches.json is a list of batches; a batch maps each input's name to {"dims": [...], "data": [...]}.
// Prints one JSON line per step. A folder with several named steps trains each of them on each batch.

import { readFileSync, writeFileSync } from "node:fs";
import { load } from "gradgraph";
import ort from "onnxruntime-node";

const [folder, batchesFile, epochs = "1", trained] = process.argv.slice(2);
const batches = JSON.parse(readFileSync(batchesFile, "utf8"));
const trainer = await load(folder, { ort });

for (let epoch = 0; epoch < Number(epochs); epoch++) {
  for (const batch of batches) {
    for (const name of Object.keys(trainer.parts)) {
      const { loss } = await trainer.step(name, batch);
      console.log(JSON.stringify({ ...(name && { step: name }), loss }));
    }
  }
}
if (trained) writeFileSync(trained, await trainer.exportModel());
await trainer.dispose();

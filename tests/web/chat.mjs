// Runs chat.js on rows, for tests in Python:
//
//     node chat.mjs CHAT PACKAGES job.json
//
// CHAT is the path of chat.js, and PACKAGES the node_modules with Hugging Face's packages. job.json contains a list of
// {"folder": ..., "options": {...}, "rows": text, "batches": options, "question": prompt}. Prints a JSON line for each:
// {"samples", "batches", "question", "texts"}, or {"error", "message"}.

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [chat, packages, jobs] = process.argv.slice(2);
const { batchesOf, openChat, rowsOf } = await import(pathToFileURL(chat));
const { Tokenizer } = await import(pathToFileURL(`${packages}/@huggingface/tokenizers/dist/tokenizers.mjs`));
const { Template } = await import(pathToFileURL(`${packages}/@huggingface/jinja/dist/index.js`));
const manifest = {
  inputs: [{ name: "input_ids", dtype: "int64", shape: ["batch", "length"] }],
  targets: [{ name: "target" }],
};

for (const { folder, options, rows, batches, question } of JSON.parse(readFileSync(jobs, "utf8"))) {
  let line;
  try {
    const opened = await openChat(folder, { Tokenizer, Template, ...options });
    const samples = opened.encode(rowsOf(rows));
    line = {
      samples,
      texts: samples.map(({ ids }) => opened.decode(ids)),
      batches: [...batchesOf(samples, manifest, { pad: opened.pad, ...batches })],
      question: question && opened.question(question),
    };
  } catch (error) {
    line = { error: error.name, message: error.message };
  }
  console.log(JSON.stringify(line));
}

// Compiled by a test, never run: checks that the types accept correct calls and reject wrong ones.

import * as ort from "onnxruntime-web";
import { Template } from "@huggingface/jinja";
import { Tokenizer } from "@huggingface/tokenizers";
import { batchesOf, openChat, rowsOf } from "gradgraph/chat";
import { DivergedError, bestProvider, load, type Batch, type Trainer } from "gradgraph";

async function chat(trainer: Trainer, text: string): Promise<string> {
  const opened = await openChat("llm/", { Tokenizer, Template });
  const samples = opened.encode(rowsOf(text));
  for (const batch of batchesOf(samples, trainer.manifest, { batchSize: 2, pad: opened.pad, seed: 1 }))
    await trainer.step(batch);
  // @ts-expect-error: a temperature is a number
  await opened.answer(trainer, "Who?", { temperature: "high" });
  return opened.answer(trainer, [{ role: "user", content: "Who?" }], { maxTokens: 9, onToken: (id) => id.toFixed() });
}

async function train(trainer: Trainer, batches: Batch[]): Promise<Uint8Array> {
  try {
    const { loss, accuracy } = await trainer.step(batches[0], { learning_rate: 1e-3 });
    const sum: number = loss + accuracy;
    await trainer.step("generator", batches[0]);
    const { val } = await trainer.evaluate(batches, { averaged: false });
    console.log(sum, val);
  } catch (error) {
    if (!(error instanceof DivergedError)) throw error;
  }
  const state = await trainer.state();
  const weight: readonly number[] = state["fc.weight"].dims;
  await trainer.setState(state);
  await trainer.restore(await trainer.checkpoint());
  const names: string[] = await trainer.loadWeights(await trainer.exportModel({ outputs: ["logits"] }));
  const files: Record<string, Uint8Array> = await trainer.exportAdapter();
  await trainer.loadAdapter(files);
  await trainer.exportAdapter({ family: "phi3", averaged: false });
  await trainer.loadAdapter(await trainer.exportAdapter({ format: "onnx_adapter", name: "french" }));
  const { logits } = await trainer.predict({ x: [[1, 2, 3, weight[0]]] });
  console.log(names, logits.data);
  return trainer.exportModel();
}

export async function main(): Promise<void> {
  const trainer = await load("step/", { ort, executionProviders: [await bestProvider(), "wasm"] });
  await train(trainer, [
    { x: new Float32Array(4), target: [1] },
    { x: { data: [1, 2], dims: [1, 2] }, target: [1n] },
  ]);
  await load({ "manifest.json": new Uint8Array() }, { ort });
  await load(async (file) => (await fetch(file)).arrayBuffer(), { ort, checkLoss: false });

  // @ts-expect-error: onnxruntime must be given
  await load("step/");
  // @ts-expect-error: a rate is a number
  await trainer.step({}, { learning_rate: "high" });
  // @ts-expect-error: it cannot be set
  trainer.steps = 3;
  // @ts-expect-error: there is no such format
  await trainer.exportAdapter({ format: "gguf" });
  // @ts-expect-error: there is no such method
  await trainer.fit();
  console.log(await chat(trainer, '{"text": "a"}'));
  await trainer.dispose();
}

// Fine-tunes language models on chat data: tokenizes rows, makes batches of them, and generates text during training.
//
//     import { Template } from "@huggingface/jinja";
//     import { Tokenizer } from "@huggingface/tokenizers";
//     import { batchesOf, openChat, rowsOf } from "gradgraph/chat";
//
//     const chat = await openChat("model/", { Tokenizer, Template });
//     const samples = chat.encode(rowsOf(jsonl));
//     for (const batch of batchesOf(samples, trainer.manifest, { batchSize: 4 })) await trainer.step(batch);
//     const text = await chat.answer(trainer, "How are you?");
//
// Types and documentation: chat.d.ts.

import { rowsOf } from "./chat-rows.js";
import { ChatTemplate } from "./chat-template.js";
import { GradgraphError } from "./errors.js";
import { reader } from "./step-files.js";

export { rowsOf };

const PADS = ["[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "</s>"];
const IGNORED = -100; // a label that losses ignore
const MULTIPLE = 16; // rows are padded to a multiple of this number of tokens
const LONGEST = 512; // tokens of a row

export async function openChat(folder, { Tokenizer, Template, template } = {}) {
  if (!Tokenizer) throw new GradgraphError("openChat requires { Tokenizer } from @huggingface/tokenizers");
  const read = reader(folder);
  const text = async (name) => new TextDecoder().decode(await read(name));
  const optional = (name) => text(name).catch(() => undefined);
  const tokenizer = new Tokenizer(JSON.parse(await text("tokenizer.json")), {});
  const config = JSON.parse((await optional("tokenizer_config.json")) ?? "{}");
  const source = template ?? (await optional("chat_template.jinja")) ?? ownTemplate(config.chat_template);
  if (source !== undefined && source !== "none" && !Template)
    throw new GradgraphError("the folder has a chat template; pass { Template } from @huggingface/jinja to openChat");
  const map = "added_tokens_decoder" in config ? undefined : await optional("special_tokens_map.json");
  const named = Object.entries({ ...config, ...JSON.parse(map ?? "{}") }).filter(([name]) => name.endsWith("_token"));
  const texts = named.map(([name, value]) => [name, value?.content ?? value]);
  const tokens = Object.fromEntries(texts.filter(([, value]) => typeof value === "string"));
  const isPlain = source === "none";
  return new Chat(
    tokenizer,
    source === undefined || isPlain ? undefined : new ChatTemplate(source, tokens, Template),
    tokens,
    isPlain,
  );
}

const ownTemplate = (given) => (Array.isArray(given) ? given.find((t) => t.name === "default")?.template : given);

export class Chat {
  constructor(tokenizer, template, tokens, isPlain) {
    Object.assign(this, { tokenizer, template, isPlain });
    this.end = tokenizer.token_to_id(tokens.eos_token);
    this.pad = [tokens.pad_token, ...PADS].map((name) => tokenizer.token_to_id(name)).find((n) => n !== undefined) ?? 0;
  }

  /** Tokenize rows; return {ids, learnt} for each, where `learnt` is whether each token is trained on. */
  encode(rows) {
    return rows.map((row) => {
      try {
        const isPlain = row.kind === "text" || this.isPlain;
        const sample = this.#tokens(isPlain ? plainText(row) : this.#byTemplate(row), isPlain);
        if (sample.learnt.slice(1).some(Boolean)) return sample;
      } catch (error) {
        throw new GradgraphError(`${row.place}: ${error.message}`, { cause: error });
      }
      throw new GradgraphError(`${row.place} has no token to train on; write a longer answer, or drop the row`);
    });
  }

  /** Return the tokens of a question or of messages, up to where the answer begins; without a template, of a text. */
  question(prompt) {
    if (this.isPlain || !this.template) return this.tokenizer.encode(String(prompt)).ids;
    const text = this.template.render(asMessages(prompt, "user"), { addGenerationPrompt: true });
    return this.tokenizer.encode(text, { add_special_tokens: false }).ids;
  }

  /** Return the text that the model generates after a prompt. */
  async answer(trainer, prompt, options = {}) {
    const stop = this.end === undefined ? [] : [this.end];
    const before = this.question(prompt);
    return this.decode((await generate(trainer, before, { stop, ...options })).slice(before.length));
  }

  decode(ids) {
    const options = { skip_special_tokens: true, clean_up_tokenization_spaces: false };
    return ids.length ? this.tokenizer.decode(ids, options) : "";
  }

  #byTemplate(row) {
    if (!this.template)
      throw new Error('the folder has no chat template; pass one, or template: "none" to use texts verbatim');
    const { tools } = row;
    if (row.kind === "messages") return this.template.withAnswers(row.messages, { tools });
    const prompt = asMessages(row.prompt, "user");
    const messages = [...prompt, ...asMessages(row.completion, "assistant")];
    return this.template.withAnswers(messages, { tools, given: prompt.length });
  }

  /** Return the tokens of a text, and whether each contains a character of an answer. */
  #tokens({ text, answers }, isPlain) {
    const encoded = (part) => this.tokenizer.encode(part, { add_special_tokens: false }).ids;
    const ids = encoded(text);
    const isWhole = (length) => {
      const part = encoded(text.slice(0, length));
      return part.every((id, i) => id === ids[i]) && part.length;
    };
    const learnt = new Array(ids.length).fill(false);
    for (const [begin, end] of answers) {
      const first = begin === 0 ? 0 : tokensAt(begin, -1, 0, isWhole);
      const last = end === text.length ? ids.length : tokensAt(end, 1, text.length, isWhole);
      learnt.fill(true, first, last);
    }
    return isPlain ? this.#ended(once(this.tokenizer.encode(text).ids, ids), ids, learnt) : { ids, learnt };
  }

  /** Add the special tokens that the model expects around a text without a template, and the token that ends it. */
  #ended(whole, ids, learnt) {
    const before = whole.findIndex((_, start) => ids.every((id, i) => whole[start + i] === id));
    const marks = whole.map((_, i) => learnt[i - before] ?? false);
    if (this.end === undefined) return { ids: whole, learnt: marks };
    if (whole.at(-1) !== this.end) return { ids: [...whole, this.end], learnt: [...marks, true] };
    marks[marks.length - 1] = true;
    return { ids: whole, learnt: marks };
  }
}

/** Return the tokens of a text with the tokenizer's special tokens around it, once even if the text has them, too. */
function once(whole, ids) {
  const before = whole.length > ids.length && whole[0] === whole[1] && whole[0] === ids[0] ? 1 : 0;
  const isTwice = whole.length - before > ids.length && whole.at(-1) === whole.at(-2) && whole.at(-1) === ids.at(-1);
  return whole.slice(before, isTwice ? -1 : undefined);
}

/**
 * Return the number of tokens of a text up to character `place`. If a token does not end there, try the next places in
 * steps of `by`, up to `farthest`.
 */
function tokensAt(place, by, farthest, isWhole) {
  for (let length = place; length !== farthest; length += by) {
    const count = isWhole(length);
    if (count !== false) return count;
  }
  return isWhole(farthest) || 0;
}

function plainText(row) {
  if (row.kind === "text") return { text: row.text, answers: [[0, row.text.length]] };
  if (row.kind !== "prompt" || typeof row.prompt !== "string")
    throw new Error('messages require a chat template; remove template: "none"');
  const text = row.prompt + row.completion;
  return { text, answers: [[row.prompt.length, text.length]] };
}

const asMessages = (value, role) => (typeof value === "string" ? [{ role, content: value }] : value);

// --- batches --------------------------------------------------------------------------------------------------------

export function* batchesOf(samples, manifest, { batchSize = 4, length = LONGEST, pad = 0, seed } = {}) {
  const [input] = manifest.inputs.filter(({ dtype, shape }) => shape.length === 2 && /^u?int/.test(dtype));
  const [target] = manifest.targets ?? [];
  if (!input || !target || manifest.inputs.length > 1)
    throw new GradgraphError(
      "the step has other inputs than tokens; build it from gg.surgery.language_model(model)",
    );
  const long = samples.findIndex(({ ids }) => ids.length > length);
  if (long >= 0)
    throw new GradgraphError(
      `sample ${long + 1} has ${samples[long].ids.length} tokens, more than ${length}; pass a larger { length }`,
    );
  const order = seed === undefined ? samples.map((_, i) => i) : shuffled(samples.length, random(seed));
  for (let at = 0; at < order.length; at += batchSize) {
    const rows = order.slice(at, at + batchSize).map((i) => samples[i]);
    const longest = Math.max(...rows.map(({ ids }) => ids.length));
    const width = Math.min(Math.ceil(longest / MULTIPLE) * MULTIPLE, length);
    const dims = [rows.length, width];
    const filled = (numbers, fill) => [...numbers, ...new Array(width - numbers.length).fill(fill)];
    const follows = ({ ids, learnt }) => ids.slice(1).map((id, i) => (learnt[i + 1] ? id : IGNORED));
    yield {
      [input.name]: { dims, data: rows.flatMap(({ ids }) => filled(ids, pad)) },
      [target.name]: { dims, data: rows.flatMap((row) => filled(follows(row), IGNORED)) },
    };
  }
}

function shuffled(count, draw) {
  const numbers = Array.from({ length: count }, (_, i) => i);
  for (let i = count - 1; i > 0; i--) {
    const other = Math.floor(draw() * (i + 1));
    [numbers[i], numbers[other]] = [numbers[other], numbers[i]];
  }
  return numbers;
}

/** Return a generator of random numbers in [0, 1), determined by the seed (mulberry32). */
function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

// --- writing --------------------------------------------------------------------------------------------------------

export async function generate(trainer, ids, options = {}) {
  const { maxTokens = 64, stop = [], temperature = 0, topK = Infinity, seed = 0, onToken } = options;
  const draw = random(seed);
  const [input] = trainer.manifest.inputs;
  const known = [...ids];
  for (let count = 0; count < maxTokens; count++) {
    const outputs = await trainer.predict({ [input.name]: { data: known, dims: [1, known.length] } });
    const { data, dims } = outputs.logits ?? Object.values(outputs)[0];
    const scores = data.subarray(data.length - dims.at(-1));
    const next = temperature > 0 ? drawn(scores, temperature, topK, draw()) : likeliest(scores);
    if (stop.includes(next)) break;
    known.push(next);
    if ((await onToken?.(next)) === false) break;
  }
  return known;
}

const likeliest = (scores) => scores.reduce((best, score, i) => (score > scores[best] ? i : best), 0);

/** Draw a token among the `topK` likeliest from softmax(scores / temperature); `share` is a random number in [0, 1). */
function drawn(scores, temperature, topK, share) {
  const order = Array.from(scores.keys()).sort((a, b) => scores[b] - scores[a]);
  const kept = order.slice(0, Math.min(topK, order.length));
  const weights = kept.map((i) => Math.exp((scores[i] - scores[kept[0]]) / temperature));
  let left = share * weights.reduce((a, b) => a + b);
  return kept[weights.findIndex((weight) => (left -= weight) < 0)] ?? kept[0];
}

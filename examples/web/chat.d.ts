// Types and documentation of chat.js.

import type { Batch, Folder, Trainer } from "./gradgraph.js";

/** The methods that are used of `Tokenizer` of @huggingface/tokenizers. */
export interface AnyTokenizer {
  encode(text: string, options?: { add_special_tokens?: boolean }): { ids: number[] };
  decode(ids: number[], options?: { skip_special_tokens?: boolean; clean_up_tokenization_spaces?: boolean }): string;
  token_to_id(token: string): number | undefined;
}

/** The methods that are used of `Template` of @huggingface/jinja. */
export interface AnyTemplate {
  render(variables: Record<string, unknown>): string;
}

export interface ChatOptions {
  Tokenizer: new (tokenizer: object, config: object) => AnyTokenizer;
  Template?: new (source: string) => AnyTemplate;
  /** The source of another chat template; `"none"` uses prompt, completion and text verbatim. */
  template?: string;
}

/** A message of a conversation. */
export interface Message {
  readonly role: string;
  readonly content?: string;
  readonly tool_calls?: unknown;
  /** 0: this answer is not trained on. */
  readonly weight?: number | boolean | null;
}

/** A checked row of chat data. */
export interface Row {
  readonly kind: "messages" | "prompt" | "text";
  /** The place of the row for error messages, such as "line 3". */
  readonly place: string;
  readonly [column: string]: unknown;
}

/** The tokens of a row, and whether each of them is trained on. */
export interface Sample {
  readonly ids: readonly number[];
  readonly learnt: readonly boolean[];
}

export interface BatchOptions {
  /** The number of rows of a batch; 4 by default. */
  batchSize?: number;
  /** The largest number of tokens of a row; 512 by default. A longer sample is an error. */
  length?: number;
  /** The token with which rows are padded at the end; 0 by default. */
  pad?: number;
  /** The seed with which samples are shuffled; by default they are not shuffled. */
  seed?: number;
}

export interface WritingOptions {
  /** The largest number of generated tokens; 64 by default. */
  maxTokens?: number;
  /** The tokens at which generation ends. */
  stop?: readonly number[];
  /** 0, the default, selects the likeliest token; with a higher temperature, tokens are drawn at random. */
  temperature?: number;
  /** The number of likeliest tokens to draw from; by default all. */
  topK?: number;
  /** The seed of random draws; 0 by default. */
  seed?: number;
  /** Called with each new token, and awaited; generation ends if it returns false. */
  onToken?(id: number): unknown;
}

/**
 * Read rows from text: one JSON object per line, or a list of objects, with `messages`, `prompt` and `completion`, or
 * `text`.
 */
export function rowsOf(text: string): Row[];

/**
 * Open a model's tokenizer and chat template, in a folder with tokenizer.json, and perhaps tokenizer_config.json and
 * chat_template.jinja.
 */
export function openChat(folder: Folder, options: ChatOptions): Promise<Chat>;

export class Chat {
  private constructor();
  readonly tokenizer: AnyTokenizer;
  /** The token that ends an answer. */
  readonly end: number | undefined;
  /** The token with which rows are padded. */
  readonly pad: number;

  /** Tokenize rows. In conversations, the assistant's tokens are trained on; in a text, all tokens. */
  encode(rows: readonly Row[]): Sample[];
  /** Return the tokens of a prompt, up to where the model's answer begins. */
  question(prompt: string | readonly Message[]): number[];
  /** Return the text that the model generates after a prompt. */
  answer(trainer: Trainer, prompt: string | readonly Message[], options?: WritingOptions): Promise<string>;
  decode(ids: readonly number[]): string;
}

/**
 * Yield batches of all samples once, for a step built from `gradgraph.surgery.language_model`. The target of each token
 * is the next token if that is trained on, else a label that the loss ignores. Rows are padded to a multiple of 16
 * tokens.
 */
export function batchesOf(
  samples: readonly Sample[],
  manifest: Readonly<Record<string, any>>,
  options?: BatchOptions,
): Generator<Batch>;

/**
 * Return the tokens with those that the model generates after them. There is no cache, so each new token runs the model
 * on the whole text.
 */
export function generate(trainer: Trainer, ids: readonly number[], options?: WritingOptions): Promise<number[]>;

// Types of chat.js, and what each function does.

import type { Batch, Folder, Trainer } from "./gradgraph.js";

/** What is used of `Tokenizer` of @huggingface/tokenizers. */
export interface AnyTokenizer {
  encode(text: string, options?: { add_special_tokens?: boolean }): { ids: number[] };
  decode(ids: number[], options?: { skip_special_tokens?: boolean; clean_up_tokenization_spaces?: boolean }): string;
  token_to_id(token: string): number | undefined;
}

/** What is used of `Template` of @huggingface/jinja. */
export interface AnyTemplate {
  render(variables: Record<string, unknown>): string;
}

export interface ChatOptions {
  Tokenizer: new (tokenizer: object, config: object) => AnyTokenizer;
  Template?: new (source: string) => AnyTemplate;
  /** The source of another chat template; `"none"` takes prompt, completion and text as they stand. */
  template?: string;
}

/** A message of a conversation. */
export interface Message {
  readonly role: string;
  readonly content?: string;
  readonly tool_calls?: unknown;
  /** 0: this answer is given, not learnt. */
  readonly weight?: number | boolean | null;
}

/** A row of chat data, checked. */
export interface Row {
  readonly kind: "messages" | "prompt" | "text";
  /** What messages call it, such as "line 3". */
  readonly place: string;
  readonly [column: string]: unknown;
}

/** A row as tokens, and whether each of them is to be told from those before it. */
export interface Sample {
  readonly ids: readonly number[];
  readonly learnt: readonly boolean[];
}

export interface BatchOptions {
  /** Rows of a batch; 4 by default. */
  batchSize?: number;
  /** The most tokens that a row may have; 512 by default. A longer sample is an error. */
  length?: number;
  /** The token that fills rows up at their ends; 0 by default. */
  pad?: number;
  /** Draw the order by this number; without it, samples come as they are given. */
  seed?: number;
}

export interface WritingOptions {
  /** The most tokens that are written; 64 by default. */
  maxTokens?: number;
  /** Tokens at which it ends. */
  stop?: readonly number[];
  /** 0, the default, takes the likeliest token; above it one is drawn. */
  temperature?: number;
  /** Draw from so many of the likeliest. */
  topK?: number;
  /** Of what is drawn; 0 by default. */
  seed?: number;
  /** Called with each token once it is known, and waited for; if it gives false, the text ends there. */
  onToken?(id: number): unknown;
}

/** The rows of a text: one JSON object a line, or a list of objects, with `messages`, `prompt` and `completion`, or `text`. */
export function rowsOf(text: string): Row[];

/** A model's tokenizer and chat template, of a folder with tokenizer.json, tokenizer_config.json, chat_template.jinja. */
export function openChat(folder: Folder, options: ChatOptions): Promise<Chat>;

export class Chat {
  private constructor();
  readonly tokenizer: AnyTokenizer;
  /** The token that ends an answer. */
  readonly end: number | undefined;
  /** The token that rows are filled up with. */
  readonly pad: number;

  /** Rows as tokens. Of conversations the assistant's tokens are learnt, of a text all. */
  encode(rows: readonly Row[]): Sample[];
  /** The tokens behind which the model answers. */
  question(prompt: string | readonly Message[]): number[];
  /** The text that the model writes behind a prompt. */
  answer(trainer: Trainer, prompt: string | readonly Message[], options?: WritingOptions): Promise<string>;
  decode(ids: readonly number[]): string;
}

/**
 * Batches for a step on what `gradgraph.surgery.language_model` gives: tokens, and at each place the learnt token that
 * follows. Rows are filled up to a multiple of 16 tokens. Once through all samples.
 */
export function batchesOf(
  samples: readonly Sample[],
  manifest: Readonly<Record<string, any>>,
  options?: BatchOptions,
): Generator<Batch>;

/** Tokens with those that the model writes behind them. It has no cache: each token takes the whole text once. */
export function generate(trainer: Trainer, ids: readonly number[], options?: WritingOptions): Promise<number[]>;

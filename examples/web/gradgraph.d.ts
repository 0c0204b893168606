// Types of gradgraph.js, and what each function does.

import type { InferenceSession, Tensor, TensorConstructor, InferenceSessionFactory } from "onnxruntime-common";

/** onnxruntime-web or onnxruntime-node, as `import * as ort from "onnxruntime-web"` gives it. */
export interface Onnxruntime {
  readonly InferenceSession: InferenceSessionFactory;
  readonly Tensor: TensorConstructor;
}

/** The bytes of a file. */
export type Bytes = Uint8Array | ArrayBuffer;

/**
 * Where the step folder is: its address, a path (Node.js), the bytes of its files by their names, or a function that
 * gives the bytes of one.
 */
export type Folder = string | URL | Readonly<Record<string, Bytes>> | ((file: string) => Bytes | Promise<Bytes>);

export interface LoadOptions {
  ort: Onnxruntime;
  /** What computes, such as `["webgpu", "wasm"]`, by default what onnxruntime chooses. The state stays on WebGPU. */
  executionProviders?: InferenceSession.SessionOptions["executionProviders"];
  /** Further options of onnxruntime's sessions. */
  sessionOptions?: InferenceSession.SessionOptions;
  /** Refuse a step whose loss is NaN or infinite, and keep the state before it; on by default. */
  checkLoss?: boolean;
  /**
   * Refuse what trains wrong on WebGPU: the provider JSEP, of a plain "onnxruntime-web", and steps that were not built
   * for `web-gpu`. On by default.
   */
  checkProvider?: boolean;
}

export type TypedArray =
  | Float32Array
  | Float64Array
  | Int8Array
  | Int16Array
  | Int32Array
  | Uint8Array
  | Uint16Array
  | Uint32Array
  | BigInt64Array
  | BigUint64Array;

/** Numbers of a tensor in lists in lists; labels may be plain numbers. */
export type Numbers = number | bigint | boolean | string | readonly Numbers[];

/** A tensor that is fed: in lists, or in a row, where the manifest leaves one size open, which follows. */
export type Value =
  | Tensor
  | TypedArray
  | Numbers
  | { readonly data: TypedArray | Numbers; readonly dims?: readonly number[]; readonly type?: string };

/**
 * Inputs and targets by their names. Labels may be names of classes, or booleans, where `manifest.data` knows these; a whole
 * number is then the class of that name if names look like numbers, and else the number of a class.
 */
export type Batch = Readonly<Record<string, Value>>;

/** A tensor that comes back: a copy, in memory of JavaScript. */
export interface Values {
  dtype: Tensor.Type;
  dims: number[];
  data: Tensor.DataType;
}

/** Loss and metrics; one of classes may be a list of one number a class, or a confusion matrix. */
export type Columns = Record<string, number> & Partial<Record<string, number | number[] | number[][]>>;

/** Hyperparameters for one step, such as `{ learning_rate: 0.001 }`; the manifest's values by default. */
export type Rates = Readonly<Record<string, number>>;

/** Whether averages of the weights are used, where the optimizer keeps some; by default they are. */
export interface Averaged {
  averaged?: boolean;
}

/** What went wrong, in one sentence. */
export class GradgraphError extends Error {}

/** The loss became NaN or infinite; the state is that before the step. */
export class DivergedError extends GradgraphError {}

/** Load a step folder, and initialise its state. */
export function load(folder: Folder, options: LoadOptions): Promise<Trainer>;

/** The tensors of an `.onnx_adapter`, by the names of the inputs of a base with required inputs. */
export function adapterTensors(bytes: Bytes): Record<string, Values>;

/** "webgpu" where the browser has it and finds an adapter, else "wasm". */
export function bestProvider(): Promise<"webgpu" | "wasm">;

/** A step folder that trains. Calls wait for each other, in their order. */
export class Trainer {
  private constructor();

  /** What manifest.json says. */
  readonly manifest: Readonly<Record<string, any>>;
  /** The named steps; a step that is the only one has the name "". */
  readonly parts: Readonly<Record<string, any>>;
  /** Steps done since the state was initialised. */
  readonly steps: number;
  /** Of several named steps, how often each was done. */
  readonly counts: Readonly<Record<string, number>>;

  /** Train on one batch. */
  step(batch: Batch, rates?: Rates): Promise<Columns>;
  /** Of several named steps, do this one. */
  step(name: string, batch: Batch, rates?: Rates): Promise<Columns>;

  /** Loss and metrics over one batch, or over all batches of a list or generator. Nothing is trained. */
  evaluate(data: Batch | Iterable<Batch> | AsyncIterable<Batch>, options?: Averaged): Promise<Columns>;

  /** The model's own outputs by name; targets are not needed. */
  predict(inputs: Batch, options?: Averaged): Promise<Record<string, Values>>;

  /** The trained model as the bytes of an .onnx file: no loss, no optimizer, evaluation form, weights inside. */
  exportModel(options?: Averaged & { outputs?: readonly string[] }): Promise<Uint8Array>;

  /** A copy of every tensor of the state, by name. */
  state(): Promise<Record<string, Values>>;
  /** Go on from what `state()` gave. */
  setState(state: Readonly<Record<string, Values>>): Promise<void>;

  /** The bytes of a checkpoint; `gradgraph train --resume` and `gg.Trainer.resume` read it, too. */
  checkpoint(): Promise<Uint8Array>;
  /** Go on from a checkpoint, of `checkpoint()` or of gradgraph in Python. */
  restore(checkpoint: Bytes): Promise<void>;

  /** Take the weights of an .onnx file by their names; gives the names. What the optimizer remembers stays. */
  loadWeights(model: Bytes): Promise<string[]>;

  /**
   * The trained adapters without their model, as `gradgraph.surgery.save_adapter` saves them: the two files of PEFT's
   * folder by their names, or one of onnxruntime's adapter format. `name` says which, where the step trains several;
   * `family` gives layers the names of Hugging Face's models: q_proj, k_proj, v_proj of a packed layer.
   */
  exportAdapter(
    options?: Averaged & { format?: "peft"; name?: string; family?: "llama" | "phi3" | "phi" },
  ): Promise<Record<string, Uint8Array>>;
  exportAdapter(options: Averaged & { format: "onnx_adapter"; name?: string }): Promise<Uint8Array>;
  /**
   * Take an adapter of either form, also one of PEFT with the names of the model or of a family. What the optimizer
   * remembers stays.
   */
  loadAdapter(adapter: Bytes | Readonly<Record<string, Bytes>>, options?: { name?: string }): Promise<void>;

  /** The state as init.onnx gives it. */
  reset(): Promise<void>;

  /** Release the sessions and the buffers on the device; the trainer cannot be used after it. */
  dispose(): Promise<void>;
}

// Types and documentation of gradgraph.js.

import type { InferenceSession, Tensor, TensorConstructor, InferenceSessionFactory } from "onnxruntime-common";

/** onnxruntime-web or onnxruntime-node, as imported by `import * as ort from "onnxruntime-web"`. */
export interface Onnxruntime {
  readonly InferenceSession: InferenceSessionFactory;
  readonly Tensor: TensorConstructor;
}

/** The bytes of a file. */
export type Bytes = Uint8Array | ArrayBuffer;

/**
 * The step folder: its URL, a path (Node.js), the bytes of its files by name, or a function that returns the bytes of a
 * file.
 */
export type Folder = string | URL | Readonly<Record<string, Bytes>> | ((file: string) => Bytes | Promise<Bytes>);

export interface LoadOptions {
  ort: Onnxruntime;
  /** The execution providers, such as `["webgpu", "wasm"]`; by default onnxruntime's. WebGPU keeps the state, too. */
  executionProviders?: InferenceSession.SessionOptions["executionProviders"];
  /** Further options of onnxruntime's sessions. */
  sessionOptions?: InferenceSession.SessionOptions;
  /** Throw DivergedError if the loss is NaN or infinite, and keep the state before this step; on by default. */
  checkLoss?: boolean;
  /**
   * Reject configurations that train incorrectly on WebGPU: the JSEP provider of plain "onnxruntime-web", and steps
   * that were not built for `web-gpu`. On by default.
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

/** The elements of a tensor as nested lists. */
export type Numbers = number | bigint | boolean | string | readonly Numbers[];

/**
 * The value of an input or target: a tensor, nested lists, or a flat list or typed array, whose shape follows from the
 * manifest if at most one size is unknown there.
 */
export type Value =
  | Tensor
  | TypedArray
  | Numbers
  | { readonly data: TypedArray | Numbers; readonly dims?: readonly number[]; readonly type?: string };

/**
 * Inputs and targets by name. Labels may be class names or booleans if `manifest.data` has the classes. A whole number
 * is the class of this name if class names look like numbers, otherwise a class index.
 */
export type Batch = Readonly<Record<string, Value>>;

/** A copy of a tensor in JavaScript memory. */
export interface Values {
  dtype: Tensor.Type;
  dims: number[];
  data: Tensor.DataType;
}

/** Loss and metrics by name; a metric may be a list with a number per class, or a confusion matrix. */
export type Columns = Record<string, number> & Partial<Record<string, number | number[] | number[][]>>;

/** Hyperparameters for one step, such as `{ learning_rate: 0.001 }`; the manifest's values by default. */
export type Rates = Readonly<Record<string, number>>;

/** Whether to use averaged weights if the optimizer keeps them; true by default. */
export interface Averaged {
  averaged?: boolean;
}

/** An error of the library; the message is one sentence. */
export class GradgraphError extends Error {}

/** Thrown if the loss is NaN or infinite; the state is that before the step. */
export class DivergedError extends GradgraphError {}

/** Load a step folder, and initialise its state. */
export function load(folder: Folder, options: LoadOptions): Promise<Trainer>;

/** Return the tensors of an `.onnx_adapter` by name: the inputs of a base model with adapters as required inputs. */
export function adapterTensors(bytes: Bytes): Record<string, Values>;

/** Return "webgpu" if the browser supports WebGPU and has an adapter, else "wasm". */
export function bestProvider(): Promise<"webgpu" | "wasm">;

/** A trainer of a step folder. Calls are run one after the other, in their order. */
export class Trainer {
  private constructor();

  /** The content of manifest.json. */
  readonly manifest: Readonly<Record<string, any>>;
  /** The named steps; a single step has the name "". */
  readonly parts: Readonly<Record<string, any>>;
  /** The number of steps since the state was initialised. */
  readonly steps: number;
  /** The number of steps of each name, if there are several named steps. */
  readonly counts: Readonly<Record<string, number>>;

  /** Train on one batch. */
  step(batch: Batch, rates?: Rates): Promise<Columns>;
  /** Run one of several named steps on a batch. */
  step(name: string, batch: Batch, rates?: Rates): Promise<Columns>;

  /** Return loss and metrics over one batch, or over all batches of a list or generator, without training. */
  evaluate(data: Batch | Iterable<Batch> | AsyncIterable<Batch>, options?: Averaged): Promise<Columns>;

  /** Return the model's own outputs by name; targets are not required. */
  predict(inputs: Batch, options?: Averaged): Promise<Record<string, Values>>;

  /** Return the trained model as bytes of an .onnx file: evaluation mode, with weights, without loss and optimizer. */
  exportModel(options?: Averaged & { outputs?: readonly string[] }): Promise<Uint8Array>;

  /** Return a copy of every state tensor by name. */
  state(): Promise<Record<string, Values>>;
  /** Set the state to a result of `state()`. */
  setState(state: Readonly<Record<string, Values>>): Promise<void>;

  /** Return the bytes of a checkpoint, which `gradgraph train --resume` and `gg.Trainer.resume` read, too. */
  checkpoint(): Promise<Uint8Array>;
  /** Resume from a checkpoint of `checkpoint()` or of gradgraph in Python. */
  restore(checkpoint: Bytes): Promise<void>;

  /** Load the weights of an .onnx file by name; return the loaded names. The optimizer's state is kept. */
  loadWeights(model: Bytes): Promise<string[]>;

  /**
   * Return the trained adapters without their model, as `gradgraph.surgery.save_adapter` saves them: PEFT's two files
   * by name, or the bytes of onnxruntime's adapter format. `name` selects the adapters if the step trains several sets.
   * `family` uses the layer names of a Hugging Face model family, such as q_proj, k_proj and v_proj for a packed layer.
   */
  exportAdapter(
    options?: Averaged & { format?: "peft"; name?: string; family?: "llama" | "phi3" | "phi" | "granitemoehybrid" | "qwen3_5" | "lfm2" },
  ): Promise<Record<string, Uint8Array>>;
  exportAdapter(options: Averaged & { format: "onnx_adapter"; name?: string }): Promise<Uint8Array>;
  /**
   * Load an adapter in either format; PEFT's may have the layer names of the model or of a family. The optimizer's
   * state is kept.
   */
  loadAdapter(adapter: Bytes | Readonly<Record<string, Bytes>>, options?: { name?: string }): Promise<void>;

  /** Initialise the state again, by init.onnx. */
  reset(): Promise<void>;

  /** Release the sessions and the buffers on the device; the trainer cannot be used afterwards. */
  dispose(): Promise<void>;
}

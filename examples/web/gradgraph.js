// Trains a gradgraph step folder with onnxruntime-web or onnxruntime-node:
//
//     import * as ort from "onnxruntime-web";
//     import { load } from "gradgraph";
//
//     const trainer = await load("step/", { ort });
//     const { loss } = await trainer.step({ x, target });
//
// Types and documentation: gradgraph.d.ts.

import { decodeAdapterFile, isAdapterFile } from "./adapter-format.js";
import { adapterFile, adapterFrom, adaptersOf, chosen, peftFiles } from "./adapters.js";
import { decodeCheckpoint, encodeCheckpoint } from "./checkpoint.js";
import { asNumbers } from "./classes.js";
import { DivergedError, GradgraphError } from "./errors.js";
import { finished } from "./measures.js";
import { inferenceModel, storedTensors } from "./onnx-file.js";
import { StepFiles, asBytes } from "./step-files.js";
import { asTensor, checkLabels, checkSizes, checkedValue, copied, copyOf, discard, isBatch } from "./values.js";

export { DivergedError, GradgraphError };

/** Return the tensors of an .onnx_adapter, which are inputs of a base model: name -> {dtype, dims, data}. */
export function adapterTensors(bytes) {
  return told("the adapter cannot be read", () => {
    const plain = asBytes("adapter", bytes);
    if (!isAdapterFile(plain)) throw new Error("it is not an .onnx_adapter; pass a file that save_adapter has written");
    return decodeAdapterFile(plain);
  });
}

const ON_GPU = new Set(["float32", "float16", "int32", "int64", "uint32"]); // element types that WebGPU buffers support
const ONE_MACHINE = new Set(["ort-cpu", "ort-cpu-native", "ort-cuda"]); // backends whose steps do not run on the web
const JSEP = new WeakSet(); // environments of onnxruntime-web whose WebGPU provider is JSEP, written in JavaScript
const usesWebGpu = (providers = []) => providers.some((provider) => (provider.name ?? provider) === "webgpu");
const quoted = (names) => [...names].map((name) => `'${name}'`).join(", ") || "none";

/** Return "webgpu" if the browser supports WebGPU and has an adapter, else "wasm". */
export async function bestProvider() {
  const adapter = await globalThis.navigator?.gpu?.requestAdapter().catch(() => null);
  return adapter ? "webgpu" : "wasm";
}

export async function load(folder, options = {}) {
  const { ort, executionProviders, sessionOptions = {}, checkLoss = true, checkProvider = true } = options;
  if (!ort?.InferenceSession)
    throw new GradgraphError(
      "load requires onnxruntime: load(folder, { ort }), with ort from onnxruntime-web or onnxruntime-node",
    );
  const files = new StepFiles(folder);
  const manifest = await files.manifest();
  if (ONE_MACHINE.has(manifest.backend))
    throw new GradgraphError(`the step was built for '${manifest.backend}'; build it with backend="web"`);
  if (checkProvider && usesWebGpu(executionProviders) && manifest.backend !== "web-gpu")
    throw new GradgraphError(
      `the step was built for '${manifest.backend}', and WebGPU rejects some of its nodes, or computes them ` +
        'incorrectly; build it with backend="web-gpu"',
    );
  const trainer = new Trainer(manifest, files, ort, { executionProviders, sessionOptions, checkLoss, checkProvider });
  await trainer.reset();
  return trainer;
}

export class Trainer {
  steps = 0; // the number of steps since the state was initialised
  counts = {}; // the number of steps of each name, if there are several named steps
  #state = new Map(); // name -> tensor, on the device if possible
  #sessions = new Map();
  #turn = Promise.resolve(); // the previous call: calls run one after the other, as each reads the state of the last
  #seed = 0;

  constructor(manifest, files, ort, options) {
    this.manifest = manifest;
    this.specs = Object.fromEntries(manifest.state.map((s) => [s.name, s]));
    this.batch = Object.fromEntries([...manifest.inputs, ...(manifest.targets ?? [])].map((s) => [s.name, s]));
    this.parts = manifest.steps ?? { "": onlyPart(manifest, Object.keys(this.batch)) };
    Object.assign(this, { files, ort, ...options });
    this.onGpu = usesWebGpu(this.executionProviders);
  }

  /** Initialise the state again, by init.onnx. */
  reset() {
    return this.#inTurn(async () => {
      const providers = this.onGpu ? ["wasm"] : this.executionProviders; // init.onnx only outputs stored values
      const session = await this.#open("init", await this.files.bytes("init.onnx"), { executionProviders: providers });
      this.#replace(await session.run({}));
      await session.release?.();
      [this.steps, this.counts] = [0, {}];
    });
  }

  /** Train on one batch: step(batch, rates), or step(name, batch, rates). */
  step(...given) {
    const [name, batch, rates = {}] = typeof given[0] === "string" ? given : ["", ...given];
    return this.#inTurn(async () => {
      const part = this.#part(name);
      const session = await this.#training(name);
      const feeds = { ...this.#feeds(part.inputs, batch), ...this.#rates(part, rates), ...this.#reads(session) };
      const moved = part.writes.map((n) => this.specs[n]);
      const fetches = [...scalars(part, part.reports), ...moved.map((s) => s.next)];
      const results = await session.run(feeds, fetches);
      const columns = await this.#columns(name, part, results, part.reports);
      const loss = typeof columns.loss === "number" ? columns.loss : NaN;
      if (this.checkLoss && !Number.isFinite(loss)) {
        moved.forEach((s) => discard(results[s.next]));
        throw new DivergedError(
          `the loss became ${loss} in step ${this.steps + 1} (the state before it is kept); lower the learning rate`,
        );
      }
      this.#replace(Object.fromEntries(moved.map((s) => [s.name, results[s.next]])));
      this.steps += 1;
      if (name) this.counts[name] = (this.counts[name] ?? 0) + 1;
      return columns;
    });
  }

  /** Return loss and metrics over a batch, or over a list of batches, without training. */
  evaluate(data, { averaged = true } = {}) {
    return this.#inTurn(async () => {
      const session = await this.#session("eval", () => this.files.kept("eval.onnx"));
      const [means, totals, weights] = [{}, {}, {}];
      const parts = Object.entries(this.parts);
      const ranked = parts.flatMap(([, part]) => (part.measures ?? []).filter((m) => m.rows));
      const fetches = [...new Set([...parts.flatMap(([, part]) => scalars(part)), ...ranked.map((m) => m.sums)])];
      const wanted = Object.keys(this.batch).filter((n) => session.inputNames.includes(n));
      for await (const batch of isBatch(data) ? [data] : data) {
        const feeds = this.#feeds(wanted, batch);
        const results = await session.run({ ...feeds, ...this.#reads(session, averaged) }, fetches);
        const weight = this.#terms(feeds);
        for (const [name, part] of parts) {
          for (const [column, output] of Object.entries(numbersOf(name, part)))
            add(means, weights, column, [Number(results[output].data[0]) * weight], weight);
          for (const m of summed(part)) add(totals, weights, m.name, await results[m.sums].getData(), weight);
        }
        for (const m of ranked) totals[m.name] = [...(totals[m.name] ?? []), ...(await results[m.sums].getData())];
      }
      if (!Object.keys(weights).length) throw new GradgraphError("there are no batches to evaluate; pass at least one");
      const measures = parts.flatMap(([, part]) => part.measures ?? []);
      return {
        ...Object.fromEntries(Object.entries(means).map(([n, [total]]) => [n, total / weights[n]])),
        ...Object.fromEntries(measures.map((m) => [m.name, finished(m, totals[m.name])])),
      };
    });
  }

  /** Return the model's own outputs by name, each as {dtype, dims, data}. */
  predict(inputs, { averaged = true } = {}) {
    return this.#inTurn(async () => {
      const session = await this.#session("predict", () => this.#inference({}));
      const read = this.manifest.inputs.map((s) => s.name).filter((n) => session.inputNames.includes(n));
      const results = await session.run({ ...this.#feeds(read, inputs), ...this.#reads(session, averaged) });
      return Object.fromEntries(await Promise.all(session.outputNames.map(async (n) => [n, await copied(results[n])])));
    });
  }

  /** Return the bytes of an .onnx file with the trained model: weights inside, without loss and optimizer. */
  exportModel({ outputs, averaged = true } = {}) {
    return this.#inTurn(async () => {
      const names = this.manifest.state
        .filter((s) => s.kind === "parameter" || s.kind === "statistic")
        .map((s) => s.name);
      const weights = await this.#copies(names, averaged ? (this.manifest.averages ?? {}) : {});
      const beside = await this.files.beside("eval");
      const outside = (location) => beside.find((file) => file.path === location)?.data ?? asBytes(location);
      return this.#inference({ outputs, weights, outside });
    });
  }

  /** Return a copy of every state tensor: name -> {dtype, dims, data}. */
  state() {
    return this.#inTurn(() => this.#copies(Object.keys(this.specs)));
  }

  /** Set the state to a result of `state()`. */
  setState(state) {
    return this.#inTurn(() => this.#take(state));
  }

  /** Return the bytes of a checkpoint, which gradgraph in Python reads, too. */
  checkpoint() {
    return this.#inTurn(async () => {
      const { steps, counts } = this;
      return encodeCheckpoint(await this.#copies(Object.keys(this.specs)), { steps, counts, seed: this.#seed });
    });
  }

  /** Resume from the bytes of a checkpoint of `checkpoint()` or of gradgraph in Python. */
  restore(bytes) {
    return this.#inTurn(async () => {
      const { state, steps, counts, seed } = told("the checkpoint cannot be used", () =>
        decodeCheckpoint(asBytes("checkpoint", bytes)),
      );
      this.#take(state);
      [this.steps, this.counts, this.#seed] = [steps, counts, seed];
    });
  }

  /** Load the weights of an .onnx file by name; return the loaded names. The optimizer's state is kept. */
  loadWeights(bytes) {
    return this.#inTurn(async () => {
      const stored = told("the model cannot be read", () => storedTensors(asBytes("model", bytes)));
      const weights = this.manifest.state.filter((s) => s.kind === "parameter" || s.kind === "statistic");
      const taken = weights.filter((s) => stored[s.name]);
      if (!taken.length)
        throw new GradgraphError(
          `the model has none of this step's weights (${quoted(weights.map((s) => s.name).slice(0, 3))}, …); ` +
            "load a model with the same names",
        );
      this.#give(Object.fromEntries(taken.map((s) => [s.name, checkedValue(s, stored[s.name])])));
      return taken.map((s) => s.name);
    });
  }

  /** Return the trained adapters: PEFT's files as {file name: bytes}, or the bytes of an .onnx_adapter. */
  exportAdapter({ format = "peft", name, family, averaged = true } = {}) {
    return this.#inTurn(async () => {
      const formats = { peft: peftFiles, onnx_adapter: adapterFile };
      if (!(format in formats))
        throw new GradgraphError(`unknown adapter format '${format}'; use ${quoted(Object.keys(formats))}`);
      if (family !== undefined && format !== "peft")
        throw new GradgraphError("an .onnx_adapter file has the model's names; remove the family");
      const adapters = await this.#adapters(name);
      const names = adapters.flatMap((a) => a.weights);
      const values = await this.#copies(names, averaged ? (this.manifest.averages ?? {}) : {});
      return told("the adapter cannot be saved", () => formats[format](adapters, values, family));
    });
  }

  /** Load an adapter saved by exportAdapter, gradgraph in Python or PEFT. The optimizer's state is kept. */
  loadAdapter(given, { name } = {}) {
    return this.#inTurn(async () => {
      const adapters = await this.#adapters(name);
      this.#give(told("the adapter cannot be used", () => adapterFrom(adapters, this.specs, given)));
    });
  }

  /** Release the sessions and the buffers of the state. The trainer cannot be used afterwards. */
  dispose() {
    return this.#inTurn(async () => {
      this.#state.forEach(discard);
      this.#state.clear();
      for (const session of this.#sessions.values()) await (await session).release?.();
      this.#sessions.clear();
      this.disposed = true;
    });
  }

  // --- sessions

  #inTurn(run) {
    const done = this.#turn.then(() => {
      if (this.disposed) throw new GradgraphError("the trainer was disposed of; load the step again");
      return run();
    });
    this.#turn = done.catch(() => {});
    return done;
  }

  #session(name, bytes, preferred) {
    if (!this.#sessions.has(name)) {
      const opened = (async () => this.#open(name, await bytes(), { preferredOutputLocation: preferred }))();
      this.#sessions.set(name, opened);
      opened.catch(() => this.#sessions.delete(name)); // try again at the next call: the file may load then
    }
    return this.#sessions.get(name);
  }

  async #open(name, bytes, { preferredOutputLocation, ...options }) {
    const externalData = await this.files.beside(name);
    const environment = this.ort.env?.webgpu;
    const adapter = environment?.adapter;
    let session;
    try {
      session = await this.ort.InferenceSession.create(bytes, {
        ...(this.executionProviders && { executionProviders: this.executionProviders }),
        ...(externalData.length && { externalData }),
        ...(preferredOutputLocation && { preferredOutputLocation }),
        ...options,
        ...this.sessionOptions,
      });
    } catch (error) {
      throw new GradgraphError(`onnxruntime rejects ${name}.onnx: ${error.message ?? error}`, { cause: error });
    }
    if (!adapter && environment?.adapter) JSEP.add(environment); // only JSEP sets the adapter
    if (this.onGpu && this.checkProvider && JSEP.has(environment)) {
      await session.release();
      throw new GradgraphError(
        "this onnxruntime-web uses the WebGPU provider JSEP, which trains some networks incorrectly; " +
          'import "onnxruntime-web/webgpu", or its ort.webgpu.min.mjs',
      );
    }
    return session;
  }

  #training(name) {
    const file = name ? `train.${name}` : "train";
    const moved = this.parts[name].writes.map((n) => this.specs[n]);
    const kept = moved
      .filter((s) => ON_GPU.has(s.dtype) && s.shape.every((size) => size > 0))
      .map((s) => [s.next, "gpu-buffer"]);
    return this.#session(
      file,
      () => this.files.bytes(`${file}.onnx`),
      this.onGpu ? Object.fromEntries(kept) : undefined,
    );
  }

  async #inference(options) {
    const model = await this.files.kept("eval.onnx");
    return told("the model cannot be exported", () => inferenceModel(model, this.manifest, options));
  }

  // --- state

  #reads(session, averaged) {
    const averages = averaged ? (this.manifest.averages ?? {}) : {};
    const read = session.inputNames.filter((name) => name in this.specs);
    return Object.fromEntries(read.map((name) => [name, this.#state.get(averages[name] ?? name)]));
  }

  async #adapters(name) {
    const all = adaptersOf(await this.files.kept("eval.onnx"));
    const trained = all.filter((a) => a.weights.every((weight) => weight in this.specs));
    return chosen(trained, name);
  }

  /** Set weights, and restart their averages from these values. */
  #give(values) {
    for (const [name, average] of Object.entries(this.manifest.averages ?? {}))
      if (values[name]) values[average] = { ...values[name], data: copyOf(values[name].data) };
    this.#replace(this.#tensors(values));
  }

  #replace(values) {
    for (const [name, tensor] of Object.entries(values)) {
      discard(this.#state.get(name));
      this.#state.set(name, tensor);
    }
  }

  async #copies(names, averages = {}) {
    const copy = async (name) => [name, await copied(this.#state.get(averages[name] ?? name))];
    return Object.fromEntries(await Promise.all(names.map(copy)));
  }

  #take(state) {
    const unknown = Object.keys(state).filter((name) => !(name in this.specs));
    const missing = Object.keys(this.specs).filter((name) => !(name in state));
    const remedy = "use a state that this step has saved";
    if (unknown.length)
      throw new GradgraphError(`the state has ${quoted(unknown)}, which are not in this step; ${remedy}`);
    if (missing.length) throw new GradgraphError(`the state lacks ${quoted(missing)}; ${remedy}`);
    const values = Object.entries(state).map(([name, value]) => [name, checkedValue(this.specs[name], value)]);
    this.#replace(this.#tensors(Object.fromEntries(values)));
  }

  #tensors(values) {
    const made = ([name, { dtype, dims, data }]) => [name, new this.ort.Tensor(dtype, copyOf(data), dims)];
    return Object.fromEntries(Object.entries(values).map(made));
  }

  // --- feeds

  #part(name) {
    const names = Object.keys(this.parts);
    if (name in this.parts) return this.parts[name];
    if (!name)
      throw new GradgraphError(
        `the step folder has several steps, ${quoted(names)}; choose one: step(name, batch)`,
      );
    const known = names[0] ? `it has ${quoted(names)}` : "it has a single step without a name: call step(batch)";
    throw new GradgraphError(`the step folder has no step '${name}'; ${known}`);
  }

  #rates(part, given) {
    const unknown = Object.keys(given).filter((name) => !(name in part.hyperparameters));
    if (unknown.length)
      throw new GradgraphError(
        `the step has no hyperparameter ${quoted(unknown)}; it has ${quoted(Object.keys(part.hyperparameters))}`,
      );
    return Object.fromEntries(
      Object.entries({ ...part.hyperparameters, ...given }).map(([name, value]) => {
        const isNumber = typeof value === "number" && Math.abs(value) <= 3.4028234e38;
        if (!isNumber || (value < 0 && name.endsWith("learning_rate")))
          throw new GradgraphError(
            `the hyperparameter '${name}' is ${typeof value === "string" ? `the text '${value}'` : value}; ` +
              `pass a ${name.endsWith("learning_rate") ? "number of 0 or more" : "finite number"}`,
          );
        return [name, new this.ort.Tensor("float32", Float32Array.of(value), [])];
      }),
    );
  }

  /** Return the tensors of a batch with these names, checked against the manifest. */
  #feeds(names, batch) {
    if (!isBatch(batch)) throw new GradgraphError(`a batch should be an object with the names ${quoted(names)}`);
    const strange = Object.keys(batch).filter((name) => !(name in this.batch));
    if (strange.length)
      throw new GradgraphError(`the step has no input ${quoted(strange)}; it has ${quoted(Object.keys(this.batch))}`);
    const sizes = {};
    return Object.fromEntries(
      names.map((name) => {
        const spec = this.batch[name];
        if (batch[name] === undefined) throw new GradgraphError(`the batch lacks '${name}'; add it`);
        const tensor = asTensor(this.ort, spec, asNumbers(this.manifest, spec, batch[name]));
        checkSizes(spec, tensor.dims, sizes);
        checkLabels(spec, tensor);
        return [name, tensor];
      }),
    );
  }

  /** Return the number of terms in a mean over a batch: labels that are not ignored, or samples if there are none. */
  #terms(feeds) {
    const labels = (this.manifest.targets ?? []).filter((s) => s.ignore_index != null && feeds[s.name]);
    if (!labels.length) return Object.values(feeds)[0]?.dims[0] ?? 1;
    const counted = (s) => feeds[s.name].data.reduce((n, label) => n + (Number(label) !== s.ignore_index), 0);
    return labels.reduce((n, s) => n + counted(s), 0);
  }

  async #columns(name, part, results, reports = []) {
    const columns = {};
    for (const [column, output] of Object.entries(numbersOf("", part)))
      columns[own(name, column)] = Number((await results[output].getData())[0]);
    for (const report of reports) columns[own(name, report)] = Number((await results[report].getData())[0]);
    for (const m of summed(part)) columns[own(name, m.name)] = finished(m, await results[m.sums].getData());
    return columns;
  }
}

// --- names ----------------------------------------------------------------------------------------------------------

/** Return the entry of a single, unnamed step: it reads all inputs and updates the whole state. */
const onlyPart = (manifest, inputs) => ({ ...manifest, inputs, writes: manifest.state.map((s) => s.name) });

const own = (step, column) => (step && column.startsWith(`${step}.`) ? column.slice(step.length + 1) : column);

/** Return the columns that are single numbers, each with the name of its output. */
function numbersOf(step, part) {
  return {
    [step ? `${step}.loss` : "loss"]: part.loss_output,
    ...Object.fromEntries((part.metrics ?? []).map((m) => [m, m])),
  };
}

/** Return the measures that are computed from sums; only an evaluation computes the others, from a row per sample. */
const summed = (part) => (part.measures ?? []).filter((m) => !m.rows);

const scalars = (part, reports = []) => [
  ...new Set([part.loss_output, ...(part.metrics ?? []), ...summed(part).map((m) => m.sums), ...reports]),
];

function add(sums, weights, name, values, weight) {
  sums[name] = Array.from(values, (value, i) => value + (sums[name]?.[i] ?? 0));
  weights[name] = (weights[name] ?? 0) + weight;
}

function told(what, run) {
  try {
    return run();
  } catch (error) {
    throw new GradgraphError(`${what}: ${error.message}`, { cause: error });
  }
}

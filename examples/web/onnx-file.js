// Reads and rewrites ONNX files as protocol buffers, field by field; unchanged fields are copied byte by byte.

/** Field numbers in onnx.proto. */
const MODEL = { irVersion: 1, graph: 7, opset: 8, metadata: 14, functions: 25 };
const GRAPH = { node: 1, name: 2, initializer: 5, doc: 10, input: 11, output: 12, valueInfo: 13 };
const NODE = { input: 1, output: 2, opType: 4, attribute: 5, domain: 7, overload: 8 };
const ATTRIBUTE = { graph: 6, graphs: 11 };
const FUNCTION = { name: 1, node: 7, domain: 10, overload: 13 };
const TENSOR = { dims: 1, dtype: 2, name: 8, raw: 9, external: 13, location: 14 };
const ENTRY = { key: 1, value: 2 };
const VALUE = { name: 1 };
const EXTERNAL = 1;

/** Element types by number: the name, and the class of arrays. */
export const TYPES = {
  1: ["float32", Float32Array],
  2: ["uint8", Uint8Array],
  3: ["int8", Int8Array],
  4: ["uint16", Uint16Array],
  5: ["int16", Int16Array],
  6: ["int32", Int32Array],
  7: ["int64", BigInt64Array],
  9: ["bool", Uint8Array],
  10: ["float16", Uint16Array],
  11: ["float64", Float64Array],
  12: ["uint32", Uint32Array],
  13: ["uint64", BigUint64Array],
  16: ["bfloat16", Uint16Array],
};
export const TYPE_NUMBERS = Object.fromEntries(Object.entries(TYPES).map(([number, [name]]) => [name, Number(number)]));

// --- protocol buffers -----------------------------------------------------------------------------------------------

/** Yield each field of a message: its number, its value (bytes or an integer), and its own bytes including the tag. */
export function* fields(bytes) {
  let at = 0;
  const varint = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      if (at >= bytes.length || shift > 63n) throw new Error("it ends within a field");
      const byte = bytes[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const start = at;
    const tag = varint();
    const wire = Number(tag & 7n);
    let value;
    if (wire === 0) value = varint();
    else {
      const size = wire === 2 ? Number(varint()) : { 1: 8, 5: 4 }[wire];
      if (size === undefined || at + size > bytes.length) throw new Error("it ends within a field");
      value = bytes.subarray(at, at + size);
      at += size;
    }
    yield { number: Number(tag >> 3n), value, whole: bytes.subarray(start, at) };
  }
}

const all = (message, number) => [...fields(message)].filter((f) => f.number === number).map((f) => f.value);
const first = (message, number) => all(message, number)[0];
const text = (value) => (value ? new TextDecoder().decode(value) : "");
const texts = (message, number) => all(message, number).map(text);

function varintBytes(value) {
  const bytes = [];
  let rest = BigInt.asUintN(64, BigInt(value));
  for (; rest > 127n; rest >>= 7n) bytes.push(Number(rest & 127n) | 128);
  return Uint8Array.from([...bytes, Number(rest)]);
}

/** Return the bytes of a field whose value is an integer, text or bytes. */
function field(number, value) {
  if (typeof value === "number" || typeof value === "bigint")
    return joined([varintBytes(number << 3), varintBytes(value)]);
  const content = typeof value === "string" ? new TextEncoder().encode(value) : value;
  return joined([varintBytes((number << 3) | 2), varintBytes(content.length), content]);
}

export function joined(parts) {
  const bytes = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    bytes.set(part, at);
    at += part.length;
  }
  return bytes;
}

// --- graphs ---------------------------------------------------------------------------------------------------------

const subgraphs = (node) =>
  all(node, NODE.attribute).flatMap((a) => [...all(a, ATTRIBUTE.graph), ...all(a, ATTRIBUTE.graphs)]);

/** Return the names that a node reads, including all names that its subgraphs read. */
function reads(node) {
  const names = new Set();
  const stack = [node];
  while (stack.length) {
    const current = stack.pop();
    texts(current, NODE.input).forEach((name) => name && names.add(name));
    for (const graph of subgraphs(current)) {
      all(graph, GRAPH.output).forEach((value) => names.add(text(first(value, VALUE.name))));
      stack.push(...all(graph, GRAPH.node));
    }
  }
  return names;
}

/** Return the nodes on which `results` depend, in order, and all names that they read, including the results. */
function needed(nodes, results) {
  const wanted = new Set(results);
  const kept = [];
  for (const node of [...nodes].reverse()) {
    if (!texts(node, NODE.output).some((name) => wanted.has(name))) continue;
    kept.push(node);
    reads(node).forEach((name) => wanted.add(name));
  }
  return [kept.reverse(), wanted];
}

/** Return the functions of a model that `nodes` call, directly or through other functions. */
function called(functions, nodes) {
  const key = (message, f, name) => JSON.stringify([f.domain, name, f.overload].map((n) => text(first(message, n))));
  const known = new Map(functions.map((f) => [key(f, FUNCTION, FUNCTION.name), f]));
  const found = new Set();
  const stack = [...nodes];
  while (stack.length && known.size) {
    const node = stack.pop();
    const name = key(node, NODE, NODE.opType);
    if (known.has(name) && !found.has(name)) {
      found.add(name);
      stack.push(...all(known.get(name), FUNCTION.node));
    }
    subgraphs(node).forEach((graph) => stack.push(...all(graph, GRAPH.node)));
  }
  return [...known].filter(([name]) => found.has(name)).map(([, f]) => f);
}

/** Return the outputs of eval.onnx that are the model's own, without a loss that the model computes from labels. */
function ownOutputs(nodes, manifest) {
  const losses = new Set(Object.values(manifest.steps ?? { "": manifest }).map((part) => part.loss_output));
  const others = manifest.outputs.filter((name) => !losses.has(name));
  if (!others.length || others.length === manifest.outputs.length) return manifest.outputs;
  const [every, plain] = [manifest.outputs, others].map((names) => needed(nodes, names)[1]);
  return manifest.inputs.some((spec) => every.has(spec.name) && !plain.has(spec.name)) ? others : manifest.outputs;
}

/**
 * Return the inference model of a step: eval.onnx without loss, metrics and targets.
 *
 * `weights` (name -> {dtype, dims, data}) become initializers; other state tensors stay inputs. `outside(location)`
 * returns the bytes of an external data file of eval.onnx, which are stored inside the model; without it, the model
 * refers to that file.
 */
export function inferenceModel(evalModel, manifest, { outputs, weights = {}, outside } = {}) {
  const graph = first(evalModel, MODEL.graph);
  const allNodes = all(graph, GRAPH.node);
  const chosen = outputs ?? ownOutputs(allNodes, manifest);
  if (!chosen.length)
    throw new Error("the step has no output besides the loss; choose outputs of the model when building it");
  for (const name of chosen)
    if (!manifest.outputs.includes(name))
      throw new Error(`the model has no output '${name}'; it has ${manifest.outputs.join(", ")}`);
  const [nodes, names] = needed(allNodes, chosen);
  const inputs = new Set(manifest.inputs.map((spec) => spec.name));
  const target = (manifest.targets ?? []).find((spec) => names.has(spec.name) && !inputs.has(spec.name));
  if (target)
    throw new Error(`an output depends on the target '${target.name}'; choose outputs that do not depend on it`);

  const named = (number, key = VALUE.name) => all(graph, number).map((value) => [text(first(value, key)), value]);
  const results = new Map(named(GRAPH.output));
  const fed = named(GRAPH.input).filter(([name]) => names.has(name));
  const parts = [
    ...nodes.map((node) => field(GRAPH.node, node)),
    field(GRAPH.name, first(graph, GRAPH.name) ?? "model"),
    ...named(GRAPH.initializer, TENSOR.name)
      .filter(([name]) => names.has(name))
      .map(([, tensor]) => field(GRAPH.initializer, inside(tensor, outside))),
    ...fed
      .filter(([name]) => name in weights)
      .map(([name]) => field(GRAPH.initializer, tensorBytes(name, weights[name]))),
    field(GRAPH.doc, first(graph, GRAPH.doc) ?? ""),
    ...fed.filter(([name]) => !(name in weights)).map(([, value]) => field(GRAPH.input, value)),
    ...chosen.map((name) => field(GRAPH.output, results.get(name))),
    ...named(GRAPH.valueInfo)
      .filter(([name]) => names.has(name))
      .map(([, value]) => field(GRAPH.valueInfo, value)),
  ];
  return joined([
    ...[...fields(evalModel)]
      .filter((f) => f.number === MODEL.irVersion || f.number === MODEL.opset)
      .map((f) => f.whole),
    field(MODEL.graph, joined(parts)),
    ...all(evalModel, MODEL.metadata)
      .filter((entry) => text(first(entry, ENTRY.key)) !== "gradgraph")
      .map((entry) => field(MODEL.metadata, entry)),
    ...called(all(evalModel, MODEL.functions), nodes).map((f) => field(MODEL.functions, f)),
  ]);
}

/** Return the metadata of a model: {key: text}. */
export const metadataOf = (model) =>
  Object.fromEntries(all(model, MODEL.metadata).map((e) => [text(first(e, ENTRY.key)), text(first(e, ENTRY.value))]));

// --- tensors --------------------------------------------------------------------------------------------------------

function tensorBytes(name, { dtype, dims, data }) {
  const raw = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  return joined([
    ...dims.map((size) => field(TENSOR.dims, size)),
    field(TENSOR.dtype, TYPE_NUMBERS[dtype]),
    field(TENSOR.name, name),
    field(TENSOR.raw, raw),
  ]);
}

/** Return a stored tensor; with `outside`, its external data are stored inside it. */
function inside(tensor, outside) {
  if (!outside || Number(first(tensor, TENSOR.location) ?? 0) !== EXTERNAL) return tensor;
  const entry = Object.fromEntries(
    all(tensor, TENSOR.external).map((e) => [text(first(e, ENTRY.key)), text(first(e, ENTRY.value))]),
  );
  const start = Number(entry.offset ?? 0);
  const kept = [...fields(tensor)].filter((f) => f.number !== TENSOR.external && f.number !== TENSOR.location);
  const raw = outside(entry.location).subarray(start, start + Number(entry.length));
  return joined([...kept.map((f) => f.whole), field(TENSOR.location, 0), field(TENSOR.raw, raw)]);
}

/** Return the initializers of a model that are stored as raw data: name -> {dtype, dims, data}. */
export function storedTensors(model) {
  const found = {};
  for (const tensor of all(first(model, MODEL.graph) ?? new Uint8Array(), GRAPH.initializer)) {
    const raw = first(tensor, TENSOR.raw);
    const [dtype, Typed] = TYPES[Number(first(tensor, TENSOR.dtype))] ?? [];
    if (!raw || !dtype) continue;
    const dims = [...fields(tensor)].filter((f) => f.number === TENSOR.dims).flatMap((f) => numbers(f.value));
    found[text(first(tensor, TENSOR.name))] = { dtype, dims, data: new Typed(new Uint8Array(raw).buffer) };
  }
  return found;
}

/** Return the integers of a repeated field, which stores one value or several packed ones. */
function numbers(value) {
  if (typeof value === "bigint") return [Number(value)];
  const found = [];
  let [number, factor] = [0, 1];
  for (const byte of value) {
    number += (byte & 127) * factor;
    factor *= 128;
    if (byte < 128) {
      found.push(number);
      [number, factor] = [0, 1];
    }
  }
  return found;
}

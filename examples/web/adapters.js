// Saves and loads adapters without their model, in PEFT's format (adapter_config.json, adapter_model.safetensors) and
// in onnxruntime's (.onnx_adapter). The metadata of eval.onnx list the adapters of a step. Names, layouts and settings
// are those of gradgraph.surgery.save_adapter in Python.

import { decodeAdapterFile, encodeAdapterFile, isAdapterFile } from "./adapter-format.js";
import { GradgraphError } from "./errors.js";
import { metadataOf } from "./onnx-file.js";
import { forLayers, forModules, ownPieces } from "./peft-names.js";
import { decodeTensors, encodeTensors } from "./safetensors.js";
import { checkedValue, copyOf, plainBytes } from "./values.js";

const [CONFIG, WEIGHTS] = ["adapter_config.json", "adapter_model.safetensors"];
const PREFIX = "base_model.model.";
const FACTORS = ["lora_A.weight", "lora_B.weight"];
const LOW_RANK = { peft: "LORA", parts: FACTORS, spread: (rank) => rank };

/**
 * The names of the tensors of each kind of adapter in PEFT's files. For kinds with a scale, `spread` returns the number
 * by which alpha is divided.
 */
const KINDS = {
  lora: { ...LOW_RANK, ofEmbeddings: ["lora_embedding_A", "lora_embedding_B"] },
  rslora: { ...LOW_RANK, ofEmbeddings: ["lora_embedding_A", "lora_embedding_B"], spread: Math.sqrt },
  dora: { ...LOW_RANK, parts: [...FACTORS, "lora_magnitude_vector"] },
  qalora: { parts: FACTORS, spread: LOW_RANK.spread },
  ia3: { peft: "IA3", parts: ["ia3_l"] },
  bitfit: { parts: ["bias"] },
  bottleneck: { parts: ["down.weight", "down.bias", "up.weight", "up.bias"] },
};
const isLowRank = (adapter) => KINDS[adapter.kind].peft === "LORA";
const isScaledIn = (adapter, place) => KINDS[adapter.kind].spread !== undefined && place === 1;
const quoted = (names) => names.map((name) => `'${name}'`).join(", ");

/** Return the adapters of a model, which its metadata list. */
export const adaptersOf = (model) => JSON.parse(metadataOf(model)["gradgraph.adapters"] ?? "[]");

/** Return the adapters called `name`; without a name, all adapters, which must have the same name. */
export function chosen(adapters, name) {
  const names = [...new Set(adapters.map((a) => a.name))];
  const refuse = (why) => {
    throw new GradgraphError(`the step ${why}`);
  };
  if (!names.length) refuse("trains no adapters; add adapters to the model with gg.lora before building the step");
  if (name === undefined && names.length > 1)
    refuse(`has several sets of adapters, ${quoted(names)}; choose one: { name: "${names[0]}" }`);
  if (name !== undefined && !names.includes(name))
    refuse(`has no adapters called '${name}'; it has ${quoted(names)}`);
  const found = adapters.filter((a) => name === undefined || a.name === name);
  const strange = found.find((a) => !(a.kind in KINDS));
  if (strange) refuse(`has adapters of kind ${strange.kind}; save and load them with gradgraph in Python`);
  return found;
}

// --- PEFT -----------------------------------------------------------------------------------------------------------

/**
 * Return PEFT's two files by name. `values`: weight -> {dtype, dims, data}; `family`: the model family whose names of
 * layers are used.
 */
export function peftFiles(adapters, values, family) {
  const [tensors, config] = family === undefined ? stored(adapters, values) : ofFamily(adapters, values, family);
  const text = `${JSON.stringify(config, null, 2)}\n`;
  return { [CONFIG]: new TextEncoder().encode(text), [WEIGHTS]: encodeTensors(tensors, { format: "pt" }) };
}

function stored(adapters, values) {
  const [tensors, ranks, named] = [{}, {}, []];
  for (const adapter of adapters) {
    if (adapter.blocks?.length) {
      for (const [module, factors] of ownPieces(adapter, factorsOf(adapter, values)))
        named.push(withFactors(adapter, module, factors, tensors, ranks));
      continue;
    }
    const held = adapter.weights.map((name) => values[name]);
    storedNames(adapter).forEach((name, place) => (tensors[name] = turned(adapter, place, held)));
    if (isLowRank(adapter)) ranks[adapter.module] = held[0].dims[adapter.operator === "Conv" ? 0 : 1];
    named.push(adapter);
  }
  return [tensors, settings(named, ranks)];
}

/** Return the factors of an adapter in PEFT's layout: {a, b, magnitude, scale}. */
function factorsOf(adapter, values) {
  const held = adapter.weights.map((name) => values[name]);
  const [a, b, magnitude] = held.map((_, place) => turned(adapter, place, held));
  return { a, b, magnitude, scale: adapter.scale };
}

/** Return a copy of `adapter` for a module with these factors, which are added to `tensors` and `ranks`. */
function withFactors(adapter, module, { a, b, magnitude, scale }, tensors, ranks) {
  const rank = (ranks[module] = a.dims[0]);
  const one = { ...adapter, module, scale, rank, alpha: scale * KINDS[adapter.kind].spread(rank) };
  const parts = [a, b, magnitude];
  storedNames(one).forEach((name, place) => (tensors[name] = parts[place]));
  return one;
}

const isLinear = (adapter) => isLowRank(adapter) && adapter.operator !== "Conv" && adapter.operator !== "Gather";

function ofFamily(adapters, values, family) {
  const other = adapters.find((adapter) => !isLinear(adapter));
  if (other)
    throw new Error(
      `'${other.module}' has an adapter of kind ${other.kind} on a ${other.operator}, whose name does not depend on ` +
        "the family; remove the family",
    );
  const given = adapters.map((adapter) => [adapter, factorsOf(adapter, values)]);
  const [tensors, ranks] = [{}, {}];
  const named = Object.entries(forModules(given, family)).map(([module, factors]) =>
    withFactors(adapters[0], module, factors, tensors, ranks),
  );
  return [tensors, settings(named, ranks)];
}

function storedNames(adapter) {
  const { parts, ofEmbeddings } = KINDS[adapter.kind];
  const names = adapter.operator === "Gather" && ofEmbeddings ? ofEmbeddings : parts;
  return names.map((part) => `${PREFIX}${adapter.module}.${part}`);
}

/** Convert a tensor to PEFT's layout, in which matrices are transposed. */
function turned(adapter, place, held) {
  const [tensor, first] = [held[place], held[0].dims];
  const isConv = adapter.operator === "Conv";
  const count = tensor.data.length;
  const shaped = (dims) => ({ ...tensor, dims });
  if (adapter.kind === "ia3" && isConv) return shaped([1, ...tensor.dims]);
  if (adapter.kind === "ia3") return shaped(adapter.side === "in" ? [1, count] : [count, 1]);
  if (!isLowRank(adapter)) return tensor;
  if (place === 2) return shaped(isConv ? [1, count, ...first.slice(2).map(() => 1)] : [count]);
  if (!isConv) return transposed(tensor);
  checkOneGroup(adapter, first, held[1].dims);
  return tensor;
}

function checkOneGroup(adapter, first, second) {
  if (first[0] !== second[1])
    throw new Error(`'${adapter.module}' is a grouped Conv; save and load its adapter with gradgraph in Python`);
}

function transposed({ dtype, dims: [rows, columns], data }) {
  const turn = copyOf(data);
  for (let row = 0; row < rows; row++)
    for (let column = 0; column < columns; column++) turn[column * rows + row] = data[row * columns + column];
  return { dtype, dims: [columns, rows], data: turn };
}

/** Return the content of adapter_config.json; `ranks` maps each module to the rank of its tensors. */
function settings(adapters, ranks) {
  const [first] = adapters;
  const { peft, spread } = KINDS[first.kind];
  const modules = [...new Set(adapters.map((a) => a.module))].sort();
  const common = { base_model_name_or_path: null, task_type: null, bias: "none", inference_mode: true };
  if (first.kind === "ia3") {
    const inward = adapters.filter((a) => a.side === "in").map((a) => a.module);
    return { peft_type: peft, target_modules: modules, feedforward_modules: inward.sort(), ...common };
  }
  if (!peft) {
    const own = { r: first.rank, lora_alpha: first.alpha, lora_dropout: first.dropout };
    return { peft_type: first.kind.toUpperCase(), ...own, target_modules: modules, ...common };
  }
  const alphas = Object.fromEntries(
    adapters.map((a) => [a.module, ranks[a.module] === a.rank ? a.alpha : a.scale * spread(ranks[a.module])]),
  );
  const [usual] = mostCommon(Object.values(ranks));
  const alpha = alphas[Object.keys(ranks).find((module) => ranks[module] === usual)];
  const others = (table, value) => Object.fromEntries(Object.entries(table).filter(([, own]) => own !== value));
  return {
    peft_type: peft,
    r: usual,
    lora_alpha: alpha,
    lora_dropout: first.dropout,
    use_rslora: first.kind === "rslora",
    use_dora: first.kind === "dora",
    rank_pattern: others(ranks, usual),
    alpha_pattern: others(alphas, alpha),
    target_modules: modules,
    ...common,
  };
}

function mostCommon(numbers) {
  const counts = new Map();
  for (const number of numbers) counts.set(number, (counts.get(number) ?? 0) + 1);
  return [...counts].reduce((best, entry) => (entry[1] > best[1] ? entry : best));
}

// --- onnxruntime ----------------------------------------------------------------------------------------------------

/** Return the bytes of an .onnx_adapter; the second factor of low-rank adapters is multiplied by their scale. */
export function adapterFile(adapters, values) {
  const tensors = {};
  for (const adapter of adapters)
    adapter.weights.forEach((name, place) => {
      const isScaled = isScaledIn(adapter, place);
      const factor = adapter.scale * adapter.weight;
      tensors[plain(adapter, name)] = isScaled ? scaled(withShares(values[name], adapter), factor) : values[name];
    });
  return encodeAdapterFile(tensors);
}

/** Return a weight's name without the name of the adapter, so that adapters of any name match the same base model. */
function plain(adapter, weight) {
  const suffix = `.${adapter.name}`;
  const own = adapter.name === "default" || adapter.kind === "bitfit";
  return own || !weight.endsWith(suffix) ? weight : weight.slice(0, -suffix.length);
}

/** Return the second factor (rank, outputs), each row multiplied by a function of the share of its piece. */
function withShares(tensor, { blocks, shares = [] }, of = (share) => share) {
  const each = shares.flatMap((share, i) => Array(blocks[i][1]).fill(Math.fround(of(share))));
  if (!each.length) return tensor;
  const width = tensor.dims[1];
  return { ...tensor, data: tensor.data.map((value, i) => value * each[Math.floor(i / width)]) };
}

function scaled(tensor, factor) {
  if (factor === 1) return tensor;
  if (tensor.dtype !== "float32")
    throw new Error(`the adapter is ${tensor.dtype}, but only float32 is supported here; use gradgraph in Python`);
  const rounded = Math.fround(factor);
  return { ...tensor, data: tensor.data.map((value) => value * rounded) };
}

// --- reading --------------------------------------------------------------------------------------------------------

/**
 * Return the weights of `adapters` in a file: name -> {dtype, dims, data}. `given` is the bytes of an .onnx_adapter, or
 * PEFT's two files by name; `specs` are the manifest's entries of the weights.
 */
export function adapterFrom(adapters, specs, given) {
  const bytes = plainBytes(given);
  if (!bytes) return fromPeft(adapters, specs, given);
  if (!isAdapterFile(bytes))
    throw new Error(`it is not an .onnx_adapter; for PEFT's format, pass { "${CONFIG}", "${WEIGHTS}" }`);
  const tensors = decodeAdapterFile(bytes);
  const wanted = adapters.flatMap((a) => a.weights.map((name, place) => [plain(a, name), name, a, place]));
  checkNames(wanted, tensors);
  return Object.fromEntries(
    wanted.map(([key, name, adapter, place]) => {
      const tensor = checkedValue({ ...specs[name], name: key }, tensors[key]);
      const isScaled = isScaledIn(adapter, place);
      const factor = 1 / (adapter.scale * adapter.weight);
      return [name, isScaled ? scaled(withShares(tensor, adapter, (share) => 1 / share), factor) : tensor];
    }),
  );
}

function fromPeft(adapters, specs, files) {
  for (const name of [CONFIG, WEIGHTS])
    if (!files?.[name]) throw new Error(`${name} is missing; pass the bytes of both files by their names`);
  const config = JSON.parse(new TextDecoder().decode(files[CONFIG]));
  checkKind(adapters[0], config);
  const what = "a safetensors file; pass the adapter's file";
  const { tensors: given } = decodeTensors(files[WEIGHTS], what);
  const { tensors, scales } = byMeaning(adapters, specs, config, given);
  const wanted = adapters.flatMap((a) => a.weights.map((name, place) => [storedNames(a)[place], name, a, place]));
  checkNames(wanted, tensors);
  return Object.fromEntries(
    wanted.map(([key, name, adapter, place]) => {
      const shapes = adapter.weights.map((weight) => specs[weight]);
      const tensor = turnedBack(adapter, place, tensors[key], shapes);
      const value = checkedValue({ ...specs[name], name: key }, tensor);
      const isScaled = isScaledIn(adapter, place);
      const scale = () => scales[adapter.module] ?? scaleIn(config, adapter);
      return [name, isScaled ? scaled(value, scale() / adapter.scale) : value];
    }),
  );
}

/** Rename the tensors of a file to this step's names; return {tensors, scales} with the scales of renamed modules. */
function byMeaning(adapters, specs, config, given) {
  const parts = KINDS[adapters[0].kind].parts;
  const modules = new Set();
  for (const key of Object.keys(given)) {
    const part = isLowRank(adapters[0]) && parts.find((p) => key.endsWith(`.${p}`));
    if (part) modules.add(key.slice(key.startsWith(PREFIX) ? PREFIX.length : 0, -part.length - 1));
  }
  const own = new Set(adapters.map((adapter) => adapter.module));
  if ([...modules].every((module) => own.has(module))) return { tensors: given, scales: {} };
  const { kind } = adapters[0];
  const whole = [...modules].filter((module) => parts.every((part) => given[`${PREFIX}${module}.${part}`]));
  const named = whole.map((module) => {
    const [a, b, magnitude] = parts.map((part) => given[`${PREFIX}${module}.${part}`]);
    return [module, { a, b, magnitude, scale: scaleIn(config, { module, kind }) }];
  });
  const linear = adapters.filter(isLinear);
  const sizes = linear.map(({ module, weights: [a, b] }) => [
    module,
    { rank: specs[a].shape[1], outputs: specs[b].shape[1] },
  ]);
  const found = forLayers(Object.fromEntries(named), linear, Object.fromEntries(sizes));
  const tensors = { ...given };
  for (const module of whole) for (const part of parts) delete tensors[`${PREFIX}${module}.${part}`];
  for (const [module, { a, b, magnitude }] of Object.entries(found))
    parts.forEach((part, place) => (tensors[`${PREFIX}${module}.${part}`] = [a, b, magnitude][place]));
  return { tensors, scales: Object.fromEntries(Object.entries(found).map(([module, { scale }]) => [module, scale])) };
}

function turnedBack(adapter, place, tensor, shapes) {
  if (isLowRank(adapter) && adapter.operator === "Conv") checkOneGroup(adapter, shapes[0].shape, shapes[1].shape);
  if (isLowRank(adapter) && place < 2 && adapter.operator !== "Conv")
    return tensor.dims.length === 2 ? transposed(tensor) : tensor;
  const sizes = shapes[place].shape;
  const fits = KINDS[adapter.kind].peft && sizes.reduce((a, b) => a * b, 1) === tensor.data.length;
  return fits && (place === 2 || adapter.kind === "ia3") ? { ...tensor, dims: sizes } : tensor;
}

function checkKind({ kind }, config) {
  const type = KINDS[kind].peft ?? kind.toUpperCase();
  const isSame = config.peft_type === type && !!config.use_dora === (kind === "dora");
  const unknown = ["lora_bias", "layer_replication", "trainable_token_indices", "alora_invocation_tokens"];
  const strange = unknown.find((key) => config[key]) ?? (config.bias && config.bias !== "none" ? "bias" : undefined);
  if (strange) throw new Error(`it has '${strange}', which is not supported`);
  if (!isSame)
    throw new Error(
      `it has the type ${config.peft_type}${config.use_dora ? " with use_dora" : ""}, but the step trains adapters ` +
        `of kind ${kind}; load an adapter of kind ${kind}, or build a step for the other kind`,
    );
}

function checkNames(wanted, tensors) {
  const names = new Set(wanted.map(([key]) => key));
  const missing = [...names].filter((key) => !(key in tensors));
  const spare = Object.keys(tensors).filter((key) => !names.has(key));
  if (missing.length || spare.length) {
    const [says, keys] = missing.length ? ["lacks", missing] : ["also has", spare];
    throw new Error(
      `it ${says} ${quoted(keys.slice(0, 3))}, so it does not match the adapters of this step; if only names differ, ` +
        "load it in Python with gradgraph.surgery.load_adapter(names={...}), and save it again",
    );
  }
}

/** Return the number by which PEFT multiplies the product of a module's factors, by the config. */
function scaleIn(config, { module, kind }) {
  const own = (patterns, usual) => {
    const key = Object.keys(patterns ?? {}).find((p) => module === p || module.endsWith(`.${p}`));
    return key === undefined ? usual : patterns[key];
  };
  const rank = own(config.rank_pattern, config.r ?? 8);
  const { spread } = KINDS[config.use_rslora ? "rslora" : kind === "rslora" ? "lora" : kind];
  return own(config.alpha_pattern, config.lora_alpha ?? 8) / spread(rank);
}

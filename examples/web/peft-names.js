// Converts layer names and adapters between Hugging Face's models and onnxruntime-genai's builder, which names some
// layers differently and packs several layers into one, as gradgraph/surgery/peft_names.py does in Python.

export const PIECES = { qkv_proj: ["q_proj", "k_proj", "v_proj"], gate_up_proj: ["gate_proj", "up_proj"] };
const OF_MIXERS = Object.fromEntries(
  ["qkv", "z", "b", "a"].map((name) => [`.linear_attn.in_proj_${name}`, `.linear_attn.${name}_proj`]),
); // Qwen3.5
const OF_LFM2 = {
  ".feed_forward.w1": ".mlp.gate_proj",
  ".feed_forward.w3": ".mlp.up_proj",
  ".feed_forward.w2": ".mlp.down_proj",
};
const OF_GRANITE = {
  ".shared_mlp.input_linear": ".mlp.gate_up_proj",
  ".shared_mlp.output_linear": ".mlp.down_proj",
};
/** Parts of Hugging Face's names, and the builder's names for them. */
export const OURS = {
  ".self_attn.": ".attn.",
  ".attn.dense": ".attn.o_proj",
  ".attn.out_proj": ".attn.o_proj",
  ".mlp.router": ".moe.router",
  ...OF_MIXERS,
  ...OF_LFM2,
  ...OF_GRANITE,
};
const OF_A_BUILDER = /^(.*\.)?layers\.\d+\.(attn|self_attn|mlp|moe)\..+$/; // other layers have PyTorch's names
const NUMBERED = /^(?:.*\.)?(layers\.\d+\..+)$/;

/**
 * The model families: the layers that the family packs, its name of the output projection of attention, other ends of
 * its names with the builder's, and its name of the module with the layers.
 */
export const FAMILIES = {
  llama: familyOf({}),
  phi3: familyOf({ packed: Object.keys(PIECES) }),
  phi: familyOf({ output: "dense" }),
  granitemoehybrid: familyOf({ packed: ["gate_up_proj"], others: OF_GRANITE }),
  qwen3_5: familyOf({ others: OF_MIXERS, root: "model.language_model" }),
  lfm2: familyOf({ output: "out_proj", others: { ...OF_LFM2, ".feed_forward.experts": ".moe.experts" } }),
};

function familyOf({ packed = [], output = "o_proj", others = {}, root = "model" }) {
  return { packed, output, others, root };
}

const last = (name) => name.slice(name.lastIndexOf(".") + 1);
const sibling = (name, other) => name.slice(0, name.length - last(name).length) + other;
const total = (numbers) => numbers.reduce((a, b) => a + b, 0);

function asOurs(module) {
  for (const [theirs, ours] of Object.entries(OURS)) module = module.replaceAll(theirs, ours);
  return module;
}

function asTheirs(layer, family) {
  if (!OF_A_BUILDER.test(layer) && !layer.includes(".linear_attn.")) return layer;
  const whole = layer.startsWith("model.layers.") ? family.root + layer.slice("model".length) : layer;
  const end = Object.entries(family.others).find(([, ours]) => whole.endsWith(ours));
  if (end) return whole.slice(0, whole.length - end[1].length) + end[0];
  const name = whole.replaceAll(".attn.", ".self_attn.").replace(/\.moe\.(router|experts)/g, ".mlp.$1");
  return name.replace(/\.self_attn\.o_proj$/, `.self_attn.${family.output}`);
}

const piecesOf = (name) => (PIECES[last(name)] ?? [last(name)]).map((piece) => sibling(name, piece));
const packOf = (name) => {
  const pack = Object.keys(PIECES).find((key) => PIECES[key].includes(last(name)));
  return pack && sibling(name, pack);
};

// --- factors: {a: [rank, inputs], b: [outputs, rank], magnitude, scale}, tensors {dtype, dims, data} in PEFT's layout

function rows({ dtype, dims: [, columns], data }, begin, end) {
  return { dtype, dims: [end - begin, columns], data: data.slice(begin * columns, end * columns) };
}

function columns({ dtype, dims: [count, width], data }, begin, end) {
  const cut = new data.constructor(count * (end - begin));
  for (let row = 0; row < count; row++)
    cut.set(data.subarray(row * width + begin, row * width + end), row * (end - begin));
  return { dtype, dims: [count, end - begin], data: cut };
}

function stacked(tensors) {
  const data = new tensors[0].data.constructor(total(tensors.map((t) => t.data.length)));
  let at = 0;
  for (const tensor of tensors) {
    data.set(tensor.data, at);
    at += tensor.data.length;
  }
  return { ...tensors[0], dims: [total(tensors.map((t) => t.dims[0])), ...tensors[0].dims.slice(1)], data };
}

/**
 * Split the adapter of a packed layer into the adapters of its pieces, which have `sizes` outputs. `blocks` are the
 * outputs and the rank of each piece, if B is zero outside these blocks; a piece of rank 0 has no adapter (undefined).
 * `shares` are the scales of the pieces, relative to that of the adapter.
 */
function split({ a, b, magnitude, scale }, sizes, { blocks = [], shares = [] } = {}) {
  const apart = String(blocks.map(([size]) => size)) === String(sizes);
  let [row, rank] = [0, 0];
  return sizes.map((size, i) => {
    const [from, first] = [row, rank];
    row += size;
    rank += apart ? blocks[i][1] : 0;
    if (apart && first === rank) return undefined;
    const own = magnitude && { ...magnitude, dims: [size], data: magnitude.data.slice(from, row) };
    const part = rows(b, from, row);
    return apart
      ? { a: rows(a, first, rank), b: columns(part, first, rank), magnitude: own, scale: scale * (shares[i] ?? 1) }
      : { a, b: part, magnitude: own, scale };
  });
}

/** Return the factors with one scale: the shares of the pieces are multiplied into B (outputs, rank). */
function plain({ blocks, shares = [] }, factors) {
  if (!shares.length) return factors;
  const each = shares.flatMap((share, i) => Array(blocks[i][1]).fill(Math.fround(share)));
  const width = factors.b.dims[1];
  return { ...factors, b: { ...factors.b, data: factors.b.data.map((x, i) => x * each[i % width]) } };
}

/** Return whether B is zero outside diagonal blocks with these numbers of outputs and ranks. */
function isApart({ b }, blocks) {
  const width = b.dims[1];
  if (total(blocks.map(([, ranks]) => ranks)) !== width) return false;
  let [row, column] = [0, 0];
  for (const [size, ranks] of blocks) {
    for (const end = row + size; row < end; row++)
      for (let c = 0; c < width; c++)
        if (b.data[row * width + c] !== 0 && (c < column || c >= column + ranks)) return false;
    column += ranks;
  }
  return true;
}

/**
 * Join the adapters of the pieces of a packed layer; pieces that share an A of rank `rank` share it in the result.
 * `shares` are the scales of the pieces in the step, relative to that of its adapter.
 */
function joined(pieces, sizes, rank, shares = []) {
  const held = pieces.filter(Boolean);
  const [{ a }] = held;
  const share = (piece) => shares[pieces.indexOf(piece)] ?? 1;
  const scale = held[0].scale / share(held[0]);
  if (held.some((p) => p.magnitude) && held.length < pieces.length)
    throw new Error("it has DoRA for only some pieces of a packed layer; load it with gradgraph in Python");
  const magnitude = held[0].magnitude && stacked(held.map((p) => p.magnitude));
  const isShared = ({ a: other }) => other.data.every((x, i) => x === a.data[i]) && other.data.length === a.data.length;
  const scaledB = (piece) => piece.b.data.map((x) => x * Math.fround(piece.scale / share(piece) / scale));
  if (held.length === pieces.length && a.dims[0] === rank && held.every(isShared))
    return { a, b: stacked(held.map((p) => ({ ...p.b, data: scaledB(p) }))), magnitude, scale };
  const ranks = pieces.map((p) => p?.a.dims[0] ?? 0);
  const width = total(ranks);
  const data = new a.data.constructor(total(sizes) * width);
  let [row, column] = [0, 0];
  pieces.forEach((piece, i) => {
    const numbers = piece && scaledB(piece);
    for (let r = 0; piece && r < sizes[i]; r++)
      data.set(numbers.subarray(r * ranks[i], (r + 1) * ranks[i]), (row + r) * width + column);
    row += sizes[i];
    column += ranks[i];
  });
  return { a: stacked(held.map((p) => p.a)), b: { ...a, dims: [total(sizes), width], data }, magnitude, scale };
}

// --- names ----------------------------------------------------------------------------------------------------------

/** Return the outputs of each piece of a packed layer, as recorded in the model; two unrecorded pieces are equal. */
function sizesOf({ module, pieces = [], blocks = [] }, outputs) {
  if (pieces.length) return pieces;
  if (blocks.length) return blocks.map(([size]) => size);
  if (piecesOf(module).length === 2) return [outputs / 2, outputs / 2];
  throw new Error(
    `the boundaries of queries, keys and values in '${module}' are unknown; save and load it with gradgraph in Python`,
  );
}

/** Return the adapters of the pieces that an adapter with blocks joins: a list of [module, factors]. */
export function ownPieces(adapter, factors) {
  const parts = split(factors, adapter.blocks.map(([size]) => size), adapter);
  return piecesOf(adapter.module).map((piece, i) => [piece, parts[i]]).filter(([, part]) => part);
}

/** Return the adapters under the names of a family: module -> factors. `given` is a list of [adapter, factors]. */
export function forModules(given, name) {
  const family = FAMILIES[name];
  if (!family) throw new Error(`there is no family '${name}'; use ${Object.keys(FAMILIES).join(", ")}`);
  const held = new Map(given.map(([{ module }, factors]) => [module, factors]));
  const found = {};
  for (const [adapter, factors] of given) {
    const { module } = adapter;
    const isOurs = OF_A_BUILDER.test(module);
    const pack = isOurs ? packOf(module) : undefined;
    if (isOurs && piecesOf(module).length > 1 && !family.packed.includes(last(module))) {
      const parts = split(factors, sizesOf(adapter, factors.b.dims[0]), adapter);
      piecesOf(module).forEach((piece, i) => parts[i] && (found[asTheirs(piece, family)] = parts[i]));
    } else if (pack && family.packed.includes(last(pack))) {
      const parts = piecesOf(pack).map((piece) => held.get(piece));
      const missing = piecesOf(pack).find((_, i) => !parts[i]);
      if (missing)
        throw new Error(`'${missing}' has no adapter, but the family packs it into '${pack}'; remove the family`);
      found[asTheirs(pack, family)] ??= joined(parts, parts.map((p) => p.b.dims[0]));
    } else found[asTheirs(module, family)] = plain(adapter, factors);
  }
  return found;
}

/**
 * Return the factors of a file under the names of the model's layers: module -> factors. `ranks` maps the module of
 * each adapter to its { rank, outputs }.
 */
export function forLayers(given, adapters, ranks) {
  const theirs = byMeaning(Object.keys(given));
  const find = (name) => theirs.get(name) ?? theirs.get(NUMBERED.exec(name)?.[1]);
  const [found, used] = [{}, new Set()];
  for (const adapter of adapters) {
    const key = asOurs(adapter.module);
    const [whole, names, pack] = [find(key), piecesOf(key).map(find), packOf(key)];
    const packed = pack && find(pack);
    if (whole) found[adapter.module] = given[whole];
    else if (names.length > 1 && names.some(Boolean)) {
      const { rank, outputs } = ranks[adapter.module];
      found[adapter.module] = joined(names.map((n) => given[n]), sizesOf(adapter, outputs), rank, adapter.shares);
      checkRanks(adapter, rank, found[adapter.module]);
    } else if (packed) {
      const all = piecesOf(pack).map((piece) => adapters.find(({ module }) => asOurs(module) === piece)?.module);
      if (!all.every(Boolean))
        throw new Error(`'${packed}' is several layers in this model, and some of them have no adapter in this step`);
      const blocks = all.map((module) => [ranks[module].outputs, ranks[module].rank]);
      const sizes = blocks.map(([size]) => size);
      const parts = split(given[packed], sizes, { blocks: isApart(given[packed], blocks) ? blocks : [] });
      found[adapter.module] = parts[all.indexOf(adapter.module)];
    }
    [whole, packed, ...names].forEach((name) => name && used.add(name));
  }
  return { ...Object.fromEntries(Object.entries(given).filter(([module]) => !used.has(module))), ...found };
}

/** Throw an error if the ranks of a file's adapters do not match a packed layer's adapter in this step. */
function checkRanks({ module, blocks = [] }, rank, whole) {
  if (whole.a.dims[0] !== rank)
    throw new Error(
      `the adapters of '${module}' have the total rank ${whole.a.dims[0]}, but its adapter in this step has the rank ` +
        `${rank}; build a step from gradgraph.surgery.load_adapter(model, folder)`,
    );
  if (blocks.length && !isApart(whole, blocks))
    throw new Error(
      `the adapters of the pieces of '${module}' have other ranks than in this step; ` +
        "build a step from gradgraph.surgery.load_adapter(model, folder)",
    );
}

/** Return PEFT's modules by the builder's full name, and by the part from "layers." on if that is unique. */
function byMeaning(modules) {
  const whole = new Map(modules.map((module) => [asOurs(module), module]));
  const short = new Map();
  for (const [name, module] of whole) {
    const numbered = NUMBERED.exec(name)?.[1];
    if (numbered) short.set(numbered, short.has(numbered) ? undefined : module);
  }
  return new Map([...[...short].filter(([, module]) => module), ...whole]);
}

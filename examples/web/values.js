// Converts the user's values to tensors, and checks them against the manifest.

import { GradgraphError } from "./errors.js";

export const ARRAYS = {
  float32: Float32Array,
  float64: Float64Array,
  float16: globalThis.Float16Array,
  int64: BigInt64Array,
  int32: Int32Array,
  int16: Int16Array,
  int8: Int8Array,
  uint64: BigUint64Array,
  uint32: Uint32Array,
  uint16: Uint16Array,
  uint8: Uint8Array,
  bool: Uint8Array,
};
/** Return bytes as a plain Uint8Array, also of a Node.js Buffer, whose methods differ; undefined for anything else. */
export function plainBytes(content) {
  if (ArrayBuffer.isView(content)) return new Uint8Array(content.buffer, content.byteOffset, content.byteLength);
  const kind = Object.prototype.toString.call(content);
  return kind === "[object ArrayBuffer]" || kind === "[object SharedArrayBuffer]" ? new Uint8Array(content) : undefined;
}

/** Return a copy of bytes as an array of an element type; as bytes if JavaScript has no such array. */
export function typedBytes(dtype, bytes) {
  const own = new Uint8Array(bytes); // a copy, whose buffer begins with the first byte, so that it is aligned
  const Typed = dtype === "float16" ? Uint16Array : ARRAYS[dtype];
  return Typed ? new Typed(own.buffer) : own;
}

/** Return a copy of an array, also of a Buffer, whose own slice() is a view. */
export const copyOf = (data) => (Array.isArray(data) ? [...data] : TYPED.slice.call(data));
const TYPED = Object.getPrototypeOf(Uint8Array.prototype);

const isTensor = (value) => typeof value?.getData === "function";
export const isBatch = (value) =>
  typeof value === "object" &&
  value !== null &&
  !Array.isArray(value) &&
  !value[Symbol.iterator] &&
  !value[Symbol.asyncIterator];

export function discard(tensor) {
  if (tensor?.location === "gpu-buffer") tensor.dispose();
}

export async function copied(tensor) {
  return { dtype: tensor.type, dims: [...tensor.dims], data: copyOf(await tensor.getData()) };
}

export function checkedValue(spec, { dtype, dims, data }) {
  if (dtype !== spec.dtype || String(dims) !== String(spec.shape))
    throw new GradgraphError(`'${spec.name}' is ${dtype}[${dims}], but ${spec.dtype}[${spec.shape}] in this step`);
  return { dtype, dims, data };
}

/** Convert a tensor, a typed array, {data, dims} with or without a type, a number, or nested lists to a tensor. */
export function asTensor(ort, spec, value) {
  const type = ArrayBuffer.isView(value) ? undefined : (value?.type ?? value?.dtype);
  if (typeof type === "string" && type !== spec.dtype)
    throw new GradgraphError(`'${spec.name}' is ${type}, but the step expects ${spec.dtype}`);
  if (isTensor(value)) return value;
  const { data, dims } = ArrayBuffer.isView(value) || !value?.data ? { data: value } : value;
  const flat = ArrayBuffer.isView(data) ? data : [data].flat(Infinity);
  const sizes = dims ?? (Array.isArray(data) ? nested(spec, data, flat.length) : inferred(spec, flat.length));
  if (sizes.reduce((a, b) => a * b, 1) !== flat.length)
    throw new GradgraphError(`'${spec.name}' has ${flat.length} numbers, which do not fill the shape [${sizes}]`);
  return new ort.Tensor(spec.dtype, typed(spec, flat), sizes);
}

function typed({ name, dtype }, values) {
  if (dtype === "str") return [...values];
  const Typed = ARRAYS[dtype];
  if (values instanceof (Typed ?? Array) && ArrayBuffer.isView(values)) return values;
  if (!Typed && dtype === "float16" && values instanceof Uint16Array) return values; // the array of ort.Tensor, too
  if (!Typed)
    throw new GradgraphError(`'${name}' is ${dtype}, for which this JavaScript has no array; pass an ort.Tensor`);
  const isWhole = !dtype.startsWith("float");
  const number = (value) => {
    const isNumber = typeof value === "number" || typeof value === "bigint" || typeof value === "boolean";
    if (!isNumber || (isWhole && typeof value === "number" && !Number.isInteger(value)))
      throw new GradgraphError(`'${name}' contains ${shown(value)}, which is not ${dtype}`);
    return value;
  };
  const made = Typed.from(values, (value) =>
    dtype.endsWith("int64") ? BigInt(number(value)) : dtype === "bool" ? Number(!!number(value)) : Number(number(value)),
  );
  const other = isWhole && dtype !== "bool" ? Array.from(values).findIndex((v, i) => BigInt(v) !== BigInt(made[i])) : -1;
  if (other >= 0) throw new GradgraphError(`'${name}' contains ${values[other]}, which is not ${dtype}`);
  return made;
}

const shown = (value) => (typeof value === "string" ? `the text '${value.slice(0, 40)}'` : String(value));

/** Return the sizes of nested lists. */
function nested(spec, list, count) {
  const sizes = [];
  for (let inner = list; Array.isArray(inner); inner = inner[0]) sizes.push(inner.length);
  if (sizes.length !== spec.shape.length && sizes.length === 1) return inferred(spec, count);
  return sizes;
}

/** Return the sizes of a flat list of `count` numbers, from the manifest; at most one size may be unknown there. */
function inferred(spec, count) {
  const known = spec.shape.filter((size) => typeof size === "number");
  const product = known.reduce((a, b) => a * b, 1);
  if (known.length === spec.shape.length) return spec.shape;
  if (known.length < spec.shape.length - 1)
    throw new GradgraphError(
      `'${spec.name}' has several unknown sizes [${spec.shape}]; pass { data, dims }, or an ort.Tensor`,
    );
  if (count % product)
    throw new GradgraphError(`'${spec.name}' has ${count} numbers, which do not fill the shape [${spec.shape}]`);
  return spec.shape.map((size) => (typeof size === "number" ? size : count / product));
}

export function checkSizes(spec, dims, sizes) {
  const fits = (size, i) => typeof size !== "number" || size === dims[i];
  if (dims.length !== spec.shape.length || !spec.shape.every(fits))
    throw new GradgraphError(
      `'${spec.name}' has shape [${dims}], but the step expects [${spec.shape.map((size) => size ?? "?")}]`,
    );
  spec.shape.forEach((size, i) => {
    if (typeof size !== "string") return;
    const [known, where] = (sizes[size] ??= [dims[i], spec.name]);
    if (known !== dims[i])
      throw new GradgraphError(`'${size}' is ${dims[i]} in '${spec.name}' but ${known} in '${where}'`);
  });
}

export function checkLabels({ name, classes, ignore_index: ignored }, tensor) {
  if (classes == null || tensor.location !== "cpu") return;
  for (const value of tensor.data) {
    const label = Number(value);
    if (!(label >= 0 && label < classes) && label !== ignored)
      throw new GradgraphError(`'${name}' has the label ${label}; expected 0 to ${classes - 1}`);
  }
}

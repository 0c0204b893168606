// Reads and writes safetensors files.

import { joined } from "./onnx-file.js";
import { plainBytes, typedBytes } from "./values.js";

const DTYPES = {
  float64: ["F64", 8],
  float32: ["F32", 4],
  float16: ["F16", 2],
  bfloat16: ["BF16", 2],
  int64: ["I64", 8],
  int32: ["I32", 4],
  int16: ["I16", 2],
  int8: ["I8", 1],
  uint64: ["U64", 8],
  uint32: ["U32", 4],
  uint16: ["U16", 2],
  uint8: ["U8", 1],
  bool: ["BOOL", 1],
};
const NAMES = Object.fromEntries(Object.entries(DTYPES).map(([name, [code]]) => [code, name]));

/** Return the entries of an object, sorted by name. */
export const byName = (tensors) => Object.entries(tensors).sort(([a], [b]) => (a < b ? -1 : 1));

/** Return the bytes of a file with `tensors` (name -> {dtype, dims, data}) and `metadata` (name -> text). */
export function encodeTensors(tensors, metadata) {
  const header = { __metadata__: metadata };
  // tensors with larger elements first, so that each tensor is aligned
  const sorted = byName(tensors).sort(([, a], [, b]) => DTYPES[b.dtype][1] - DTYPES[a.dtype][1]);
  let end = 0;
  for (const [name, { dtype, dims, data }] of sorted)
    header[name] = { dtype: DTYPES[dtype][0], shape: [...dims], data_offsets: [end, (end += data.byteLength)] };
  let text = new TextEncoder().encode(JSON.stringify(header));
  text = joined([text, new Uint8Array((8 - (text.length % 8)) % 8).fill(32)]);
  const size = new Uint8Array(8);
  new DataView(size.buffer).setBigUint64(0, BigInt(text.length), true);
  return joined([size, text, ...sorted.map(([, { data }]) => bytesOf(data))]);
}

/** Return {metadata, tensors} of a safetensors file; `what` is the expected content, and the remedy, for the error. */
export function decodeTensors(bytes, what) {
  bytes = plainBytes(bytes);
  const size = bytes.length < 8 ? Infinity : Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  if (size > bytes.length - 8) throw new Error(`the file is not ${what}`);
  const { __metadata__: metadata, ...entries } = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + size)));
  const tensors = {};
  for (const [name, entry] of Object.entries(entries)) {
    const [start, end] = entry.data_offsets;
    const [dtype, content] = [NAMES[entry.dtype], bytes.subarray(8 + size + start, 8 + size + end)];
    tensors[name] = { dtype, dims: entry.shape, data: typedBytes(dtype, content) };
  }
  return { metadata, tensors };
}

export const bytesOf = (data) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength);

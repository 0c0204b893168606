// onnxruntime's adapter format: named tensors in a FlatBuffers file, as specified in onnxruntime/lora/adapter_format.
// The file has two kinds of tables, the adapter and its parameters; both have four fields of four bytes.

import { TYPES, TYPE_NUMBERS } from "./onnx-file.js";
import { bytesOf } from "./safetensors.js";
import { typedBytes } from "./values.js";

const IDENTIFIER = "TORT";
const [VTABLE, TABLE, ROOT] = [8, 20, 20]; // offset of the vtable, size of a table, offset of the root table
const FIELDS = [12, TABLE, 4, 8, 12, 16]; // the vtable: its size, the size of a table, and the offsets of its fields
const [FORMAT_VERSION, ADAPTER_VERSION, MODEL_VERSION] = [1, 1, 1];
const NAME = { name: 0, dims: 1, type: 2, data: 3 };
const PARAMETERS = 3;

export const isAdapterFile = (bytes) => String.fromCharCode(...bytes.subarray(4, 8)) === IDENTIFIER;

/** Return the bytes of an .onnx_adapter with `tensors`: name -> {dtype, dims, data}. */
export function encodeAdapterFile(tensors) {
  const encoder = new TextEncoder();
  const entries = Object.entries(tensors).map(([name, tensor]) => ({ name: encoder.encode(name), ...tensor }));
  const list = ROOT + TABLE;
  const first = list + 4 + 4 * entries.length;
  let end = first + TABLE * entries.length;
  const after = (bytes, alignment) => {
    const start = Math.ceil((end + 4) / alignment) * alignment - 4; // the length is stored before the elements
    end = start + 4 + bytes;
    return start;
  };
  for (const entry of entries)
    entry.at = [after(entry.name.length + 1, 4), after(8 * entry.dims.length, 8), after(entry.data.byteLength, 8)];
  const file = new Uint8Array(Math.ceil(end / 8) * 8);
  const view = new DataView(file.buffer);
  const put = (at, number) => view.setInt32(at, number, true);
  const refer = (at, to) => put(at, to - at);
  const table = (at) => put(at, at - VTABLE);

  put(0, ROOT);
  file.set(encoder.encode(IDENTIFIER), 4);
  FIELDS.forEach((number, i) => view.setUint16(VTABLE + 2 * i, number, true));
  table(ROOT);
  [FORMAT_VERSION, ADAPTER_VERSION, MODEL_VERSION].forEach((version, i) => put(ROOT + 4 + 4 * i, version));
  refer(ROOT + 4 + 4 * PARAMETERS, list);
  put(list, entries.length);
  entries.forEach(({ name, dtype, dims, data, at: [nameAt, dimsAt, dataAt] }, i) => {
    const start = first + TABLE * i;
    refer(list + 4 + 4 * i, start);
    table(start);
    refer(start + 4 + 4 * NAME.name, nameAt);
    refer(start + 4 + 4 * NAME.dims, dimsAt);
    put(start + 4 + 4 * NAME.type, TYPE_NUMBERS[dtype]);
    refer(start + 4 + 4 * NAME.data, dataAt);
    put(nameAt, name.length);
    file.set(name, nameAt + 4);
    put(dimsAt, dims.length);
    dims.forEach((size, axis) => view.setBigInt64(dimsAt + 4 + 8 * axis, BigInt(size), true));
    put(dataAt, data.byteLength);
    file.set(bytesOf(data), dataAt + 4);
  });
  return file;
}

/** Return the tensors in the bytes of an .onnx_adapter: name -> {dtype, dims, data}. */
export function decodeAdapterFile(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const target = (at) => at + view.getUint32(at, true);
  /** Return the offset of field `number` of the table at `start`; 0 if the field is absent. */
  const field = (start, number) => {
    const vtable = start - view.getInt32(start, true);
    const known = 4 + 2 * number < view.getUint16(vtable, true) ? view.getUint16(vtable + 4 + 2 * number, true) : 0;
    return known && start + known;
  };
  const vector = (start, number) => {
    const at = field(start, number);
    return at ? [target(at) + 4, view.getUint32(target(at), true)] : [0, 0];
  };
  const [list, count] = vector(target(0), PARAMETERS);
  const tensors = {};
  for (let i = 0; i < count; i++) {
    const start = target(list + 4 * i);
    const [[name, length], [dims, rank], [data, size]] = [NAME.name, NAME.dims, NAME.data].map((n) => vector(start, n));
    const [dtype] = TYPES[view.getInt32(field(start, NAME.type), true)] ?? [];
    tensors[new TextDecoder().decode(bytes.subarray(name, name + length))] = {
      dtype,
      dims: Array.from({ length: rank }, (_, axis) => Number(view.getBigInt64(dims + 8 * axis, true))),
      data: typedBytes(dtype, bytes.subarray(data, data + size)),
    };
  }
  return tensors;
}

// Checkpoints in the format of gradgraph in Python: safetensors with a progress record and a digest in the metadata.

import { joined } from "./onnx-file.js";
import { byName, bytesOf, decodeTensors, encodeTensors } from "./safetensors.js";

const BLOCK = 1 << 20;
const encode = (text) => new TextEncoder().encode(text);

/**
 * Return the bytes of a checkpoint of `state` (name -> {dtype, dims, data}). `steps` is the number of steps done, and
 * `counts` the number of steps of each name.
 */
export function encodeCheckpoint(state, { steps, counts, seed }) {
  const record = {
    version: 2,
    steps,
    epoch: 0,
    batch: 0,
    seed,
    fit_epoch: 0,
    fit_step: 0,
    order: {},
    sums: {},
    weight: 0,
    best: null,
    stale: 0,
    hyperparameters: {},
    sizes: null,
    history: {},
    ...(Object.keys(counts).length && { counts }),
  };
  const body = pythonJson(record);
  return encodeTensors(state, { gradgraph: pythonJson({ ...record, digest: digest(body, state) }) });
}

/** Read a checkpoint and check its digest; return {state: name -> {dtype, dims, data}, steps, counts, seed}. */
export function decodeCheckpoint(bytes) {
  const what = "a checkpoint; pass the bytes of a checkpoint that training has saved";
  const { metadata, tensors: state } = decodeTensors(bytes, what);
  if (!metadata?.gradgraph)
    throw new Error("the file contains tensors but is not a checkpoint; pass a checkpoint that training has saved");
  const [, body, written] = /^(.*), "digest": "([^"]*)"\}$/s.exec(metadata.gradgraph) ?? [];
  if (digest(`${body}}`, state) !== written) throw new Error("the checkpoint is damaged; use an older one");
  const { steps, counts = {}, seed } = JSON.parse(metadata.gradgraph);
  return { state, steps, counts, seed };
}

/** Return JSON as Python's json.dumps writes it; the record has no numbers that Python would write differently. */
function pythonJson(value) {
  if (Array.isArray(value)) return `[${value.map(pythonJson).join(", ")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value)
    .map(([k, v]) => `${JSON.stringify(k)}: ${pythonJson(v)}`)
    .join(", ")}}`;
}

function digest(body, state) {
  const measured = (text) => joined([encode(`${encode(text).length}:`), encode(text)]);
  const parts = [measured(body)];
  for (const [name, { dtype, dims, data }] of byName(state))
    parts.push(measured(`${dtype}[${dims.join(", ")}] ${name}`), bytesOf(data));
  return digestOf(joined(parts));
}

/** Return gradgraph's digest of a file: CRC-32 of every MiB, and SHA-256 over these. */
export function digestOf(bytes) {
  let blocks = "";
  for (let at = 0; at < bytes.length; at += BLOCK) {
    const block = bytes.subarray(at, at + BLOCK);
    blocks += `${block.length}:${crc32(block)};`;
  }
  if (bytes.length % BLOCK === 0) blocks += "0:0;"; // there is always a last, partial block, even if it is empty
  return `crc32-sha256:${sha256(encode(blocks))}`;
}

const CRC = Uint32Array.from({ length: 256 }, (_, i) => {
  for (let bit = 0; bit < 8; bit++) i = i & 1 ? (i >>> 1) ^ 0xedb88320 : i >>> 1;
  return i;
});

function crc32(bytes) {
  let crc = ~0;
  for (let i = 0; i < bytes.length; i++) crc = CRC[(crc ^ bytes[i]) & 255] ^ (crc >>> 8);
  return ~crc >>> 0;
}

// computed here because crypto.subtle exists only over https and on localhost, and a page may be served without either
function sha256(bytes) {
  const fraction = (x) => Math.floor((x - Math.floor(x)) * 2 ** 32);
  const primes = [];
  for (let n = 2; primes.length < 64; n++) if (primes.every((p) => n % p)) primes.push(n);
  const K = primes.map((p) => fraction(Math.cbrt(p)));
  const hash = primes.slice(0, 8).map((p) => fraction(Math.sqrt(p)));
  const blocks = Math.ceil((bytes.length + 9) / 64);
  const data = new DataView(new ArrayBuffer(64 * blocks));
  bytes.forEach((byte, i) => data.setUint8(i, byte));
  data.setUint8(bytes.length, 128);
  data.setBigUint64(64 * blocks - 8, BigInt(8 * bytes.length));
  const turn = (x, n) => (x >>> n) | (x << (32 - n));
  for (let at = 0; at < 64 * blocks; at += 64) {
    const w = Array.from({ length: 16 }, (_, i) => data.getUint32(at + 4 * i));
    let [a, b, c, d, e, f, g, h] = hash;
    for (let i = 0; i < 64; i++) {
      if (i >= 16) {
        const [x, y] = [w[i - 15], w[i - 2]];
        const s0 = turn(x, 7) ^ turn(x, 18) ^ (x >>> 3);
        const s1 = turn(y, 17) ^ turn(y, 19) ^ (y >>> 10);
        w[i] = (w[i - 16] + s0 + w[i - 7] + s1) | 0;
      }
      const t1 = (h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + K[i] + w[i]) | 0;
      const t2 = ((turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + t1) | 0, c, b, a, (t1 + t2) | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((x, i) => (hash[i] = (hash[i] + x) | 0));
  }
  return hash.map((x) => (x >>> 0).toString(16).padStart(8, "0")).join("");
}

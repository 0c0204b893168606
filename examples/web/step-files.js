// Reads the files of a step folder by URL, by path, from bytes by name, or by a function.

import { digestOf } from "./checkpoint.js";
import { GradgraphError } from "./errors.js";
import { plainBytes } from "./values.js";

const VERSION = 1; // the newest supported version of the manifest

export class StepFiles {
  #digests = {};
  #known = new Map();

  constructor(folder) {
    this.read = reader(folder);
  }

  async manifest() {
    const text = new TextDecoder().decode(await this.bytes("manifest.json"));
    let manifest;
    try {
      manifest = JSON.parse(text);
    } catch {
      throw new GradgraphError("manifest.json is not JSON; check that the address is that of a step folder");
    }
    if (!(manifest.version <= VERSION))
      throw new GradgraphError(
        `the step was written by gradgraph ${manifest.gradgraph}, manifest version ${manifest.version}; ` +
          `this library reads versions up to ${VERSION}`,
      );
    this.#digests = manifest.digests ?? {};
    return manifest;
  }

  /** Return the bytes of a file, checked against its digest. */
  async bytes(name) {
    const bytes = await this.read(name);
    if (this.#digests[name] && digestOf(bytes) !== this.#digests[name])
      throw new GradgraphError(`${name} was changed after it was saved; load it again, or build the step again`);
    return bytes;
  }

  /** Return the bytes of a file as `bytes` does, and cache them. */
  kept(name) {
    if (!this.#known.has(name)) this.#known.set(name, this.bytes(name));
    return this.#known.get(name);
  }

  /** Return the external data files of a model, for a session; not cached, as they may be large. */
  async beside(name) {
    const file = name === "init" ? "init.bin" : "frozen.bin";
    return file in this.#digests ? [{ path: file, data: await this.bytes(file) }] : [];
  }
}

/** Return a function that reads a file of a folder, which is a URL, a path (Node.js), bytes by name, or a function. */
export function reader(folder) {
  if (typeof folder === "function") return async (name) => asBytes(name, await folder(name));
  if (typeof folder === "string" || folder instanceof URL) {
    const base = String(folder).replace(/\/*$/, "/");
    const isPath = globalThis.process?.versions?.node && !/^(https?|data|blob):/.test(base);
    return isPath ? (name) => readPath(base, name) : (name) => fetched(base, name);
  }
  return async (name) => asBytes(name, folder?.[name]);
}

export function asBytes(name, content) {
  const bytes = plainBytes(content);
  if (bytes) return bytes;
  throw new GradgraphError(`the step folder has no ${name}; pass its bytes as a Uint8Array`);
}

const FILES = ["node:fs", "promises"].join("/"); // not a literal, as bundlers for browsers would try to resolve it

async function readPath(base, name) {
  const { readFile } = await import(/* webpackIgnore: true */ /* @vite-ignore */ FILES);
  try {
    return asBytes(name, await readFile(base.startsWith("file:") ? new URL(name, base) : base + name));
  } catch (error) {
    throw new GradgraphError(
      `cannot read '${base}${name}' (${error.code ?? error.message}); pass the folder that gradgraph build wrote`,
    );
  }
}

async function fetched(base, name) {
  const response = await fetch(base + name).catch((error) => ({ status: error.message }));
  if (!response.ok)
    throw new GradgraphError(`cannot load '${base}${name}' (${response.status}); check the address of the step folder`);
  return new Uint8Array(await response.arrayBuffer());
}

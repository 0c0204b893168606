// Calls the functions of a step in C (`gradgraph export --c`) that was compiled to WebAssembly, in browsers and Node.js.

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, bool: Uint8Array,
  int8: Int8Array, int16: Int16Array, int32: Int32Array, int64: BigInt64Array,
  uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array,
}; // prettier-ignore
const PAGE = 65536; // bytes
const size = ({ shape }) => shape.reduce((product, n) => product * n, 1);

/**
 * Open a trainer.
 *
 * @param {BufferSource} module the bytes of the WebAssembly module
 * @param {object} manifest manifest.json
 * @param {Uint8Array} [state] a saved state, such as state.bin; without it, that which the module contains
 */
export async function open(module, manifest, state) {
  const { instance } = await WebAssembly.instantiate(module);
  instance.exports._initialize?.();
  const trainer = new Trainer(instance.exports, manifest);
  if (state) trainer.load(state);
  return trainer;
}

/** A trainer_t in the memory of a module, with room for the arguments of each function. */
class Trainer {
  #c;
  #name;
  #end;
  #at;
  #saved;
  #places = new Map();

  constructor(c, manifest) {
    [this.#c, this.#name, this.#end] = [c, manifest.c, c.__heap_base.value];
    this.functions = manifest.functions;
    this.#at = this.#room(manifest.bytes);
    this.#saved = [this.#room(12 + manifest.state_bytes), 12 + manifest.state_bytes];
    for (const { inputs, results } of Object.values(this.functions))
      for (const tensor of [...inputs.filter(({ shape }) => shape.length), ...results])
        this.#places.set(tensor, this.#room(size(tensor) * ARRAYS[tensor.dtype].BYTES_PER_ELEMENT));
    c.memory.grow(Math.max(0, Math.ceil((this.#end - c.memory.buffer.byteLength) / PAGE)));
    this.#function("init")(this.#at);
  }

  #room(bytes) {
    const at = Math.ceil(this.#end / 8) * 8;
    this.#end = at + bytes;
    return at;
  }

  #function(suffix) {
    return this.#c[`${this.#name}_${suffix}`];
  }

  #array(tensor) {
    return new ARRAYS[tensor.dtype](this.#c.memory.buffer, this.#places.get(tensor), size(tensor));
  }

  /** Call "step", "evaluate", "predict" or "run" with inputs by name; return results by name: numbers, or arrays. */
  call(suffix, given) {
    const { inputs, results } = this.functions[suffix];
    const passed = inputs.map((tensor) => {
      const value = given[tensor.name];
      if (value === undefined) throw new Error(`${suffix} needs '${tensor.name}'`);
      if (!tensor.shape.length) return tensor.dtype.endsWith("64") && tensor.dtype !== "float64" ? BigInt(value) : value;
      if (value.length !== size(tensor))
        throw new Error(`'${tensor.name}' has ${value.length} elements instead of ${size(tensor)}`);
      this.#array(tensor).set(value);
      return this.#places.get(tensor);
    });
    const places = results.map((tensor) => this.#places.get(tensor));
    if (this.#function(suffix)(this.#at, ...passed, ...places)) throw new Error("a label or an index is out of range");
    return Object.fromEntries(
      results.map((tensor) => [tensor.name, tensor.shape.length ? this.#array(tensor).slice() : this.#array(tensor)[0]]),
    );
  }

  /** Return the state as bytes. */
  save() {
    this.#function("save")(this.#at, this.#saved[0]);
    return new Uint8Array(this.#c.memory.buffer, ...this.#saved).slice();
  }

  load(state) {
    if (state.length !== this.#saved[1]) throw new Error(`a state has ${this.#saved[1]} bytes, not ${state.length}`);
    new Uint8Array(this.#c.memory.buffer, ...this.#saved).set(state);
    if (this.#function("load")(this.#at, this.#saved[0])) throw new Error("the state is damaged, or of another program");
  }
}

// How much memory the page takes. It must be imported before onnxruntime is, whose WebAssembly memories it counts.

const made = [];
const Memory = WebAssembly.Memory;
WebAssembly.Memory = class extends Memory {
  constructor(descriptor) {
    super(descriptor);
    made.push(new WeakRef(this));
  }
};

/** Bytes of all WebAssembly memories; they never shrink, so that this is their peak. */
export const wasmBytes = () => made.reduce((sum, memory) => sum + (memory.deref()?.buffer.byteLength ?? 0), 0);

/** Bytes of the whole page, where the browser measures it (isolated pages in Chromium); else undefined. */
export async function pageBytes() {
  const measured = await performance.measureUserAgentSpecificMemory?.().catch(() => undefined);
  return measured?.bytes;
}

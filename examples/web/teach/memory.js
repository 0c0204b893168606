// Measures the memory of the page. Import this module before onnxruntime, so that it counts its WebAssembly memories.

const made = [];
const Memory = WebAssembly.Memory;
WebAssembly.Memory = class extends Memory {
  constructor(descriptor) {
    super(descriptor);
    made.push(new WeakRef(this));
  }
};

/** Return the bytes of all WebAssembly memories; as these never shrink, this is also their peak. */
export const wasmBytes = () => made.reduce((sum, memory) => sum + (memory.deref()?.buffer.byteLength ?? 0), 0);

/** Return the bytes of the whole page if the browser can measure it (isolated pages in Chromium); else undefined. */
export async function pageBytes() {
  const measured = await performance.measureUserAgentSpecificMemory?.().catch(() => undefined);
  return measured?.bytes;
}

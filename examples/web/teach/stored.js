// What the browser keeps for the next visit: files of the model in its Cache storage, and the examples.

const [CACHE, EXAMPLES] = ["teach-model", "teach-examples"];
const address = (name) => new URL(`kept/${name}`, document.baseURI).href;

/** Forget what was kept, and keep these files: name -> Blob, Response or bytes. */
export async function keepAll(files) {
  await caches.delete(CACHE);
  for (const [name, content] of Object.entries(files)) await keep(name, content);
}

export async function keep(name, content) {
  const cache = await caches.open(CACHE);
  await cache.put(address(name), content instanceof Response ? content : new Response(content));
}

export async function forget(name) {
  await (await caches.open(CACHE)).delete(address(name));
}

export const has = async (name) => Boolean(await (await caches.open(CACHE)).match(address(name)));

/** The bytes of a file that was kept. */
export async function bytes(name) {
  const found = await (await caches.open(CACHE)).match(address(name));
  if (!found) throw new Error(`the browser has not kept ${name}; pick the folder again`);
  return new Uint8Array(await found.arrayBuffer());
}

/** Keep what is written as examples, whatever the model; what is empty is forgotten. */
export function keepExamples(text) {
  if (text.trim()) localStorage.setItem(EXAMPLES, text);
  else localStorage.removeItem(EXAMPLES);
}

/** The examples that were kept; undefined where there are none. */
export const examples = () => localStorage.getItem(EXAMPLES) ?? undefined;

/** How many bytes of files are kept. */
export async function size() {
  const cache = await caches.open(CACHE);
  const kept = await Promise.all((await cache.keys()).map(async (key) => (await cache.match(key)).blob()));
  return kept.reduce((sum, blob) => sum + blob.size, 0);
}

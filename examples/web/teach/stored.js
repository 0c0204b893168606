// Stores data in the browser for the next visit: the model's files in Cache storage, and the examples in localStorage.

const [CACHE, EXAMPLES] = ["teach-model", "teach-examples"];
const address = (name) => new URL(`kept/${name}`, document.baseURI).href;

/** Replace all stored files by these: name -> Blob, Response or bytes. */
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

/** Return the bytes of a stored file. */
export async function bytes(name) {
  const found = await (await caches.open(CACHE)).match(address(name));
  if (!found) throw new Error(`${name} is not stored in the browser; pick the folder again`);
  return new Uint8Array(await found.arrayBuffer());
}

/** Store the text of the examples, which does not depend on the model; remove it if it is empty. */
export function keepExamples(text) {
  if (text.trim()) localStorage.setItem(EXAMPLES, text);
  else localStorage.removeItem(EXAMPLES);
}

/** Return the text of the stored examples; undefined if there are none. */
export const examples = () => localStorage.getItem(EXAMPLES) ?? undefined;

/** Return the total size in bytes of the stored files. */
export async function size() {
  const cache = await caches.open(CACHE);
  const kept = await Promise.all((await cache.keys()).map(async (key) => (await cache.match(key)).blob()));
  return kept.reduce((sum, blob) => sum + blob.size, 0);
}

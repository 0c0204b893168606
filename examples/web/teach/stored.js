// Files of the model that the browser keeps for the next visit, in its Cache storage.

const CACHE = "teach-model";
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

/** How many bytes are kept. */
export async function size() {
  const cache = await caches.open(CACHE);
  const kept = await Promise.all((await cache.keys()).map(async (key) => (await cache.match(key)).blob()));
  return kept.reduce((sum, blob) => sum + blob.size, 0);
}

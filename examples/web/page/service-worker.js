// The service worker makes the page work offline: it caches the page's files when it is installed, and onnxruntime's
// large files when they are first used. It also adds the headers that threads require, for hosts that cannot send them.

importScripts("files.js"); // FILES and VERSION, written when the page is made

const CACHE = `train-${VERSION}`;
const ISOLATED = { "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp" };

self.addEventListener("install", (event) => {
  const kept = caches.open(CACHE).then((cache) => cache.addAll(FILES));
  event.waitUntil(kept.then(() => self.skipWaiting()));
});

self.addEventListener("activate", (event) => {
  const old = caches.keys().then((names) => names.filter((name) => name.startsWith("train-") && name !== CACHE));
  event.waitUntil(
    old.then((names) => Promise.all(names.map((name) => caches.delete(name)))).then(() => clients.claim()),
  );
});

self.addEventListener("fetch", (event) => {
  const { method, url } = event.request;
  if (method === "GET" && url.startsWith(self.location.origin)) event.respondWith(answer(event.request));
});

async function answer(request) {
  const cache = await caches.open(CACHE);
  const known = await cache.match(request, { ignoreSearch: true });
  if (known) return isolated(known);
  const response = await fetch(request);
  if (response.ok) await cache.put(request, response.clone());
  return isolated(response);
}

function isolated(response) {
  const headers = new Headers(response.headers);
  Object.entries(ISOLATED).forEach(([name, value]) => headers.set(name, value));
  return new Response(response.body, { status: response.status, statusText: response.statusText, headers });
}

// Starts headless Chromium for tests, and a server for its pages.

import { existsSync, readFileSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { extname, join, resolve } from "node:path";

const USUAL = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
const QUIET = ["--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking"];
const FLAGS = [...QUIET, "--disable-component-update", "--disable-sync"];
const SOFTWARE_WEBGPU = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"];
const TYPES = {
  ".html": "text/html",
  ".js": "text/javascript",
  ".mjs": "text/javascript",
  ".wasm": "application/wasm",
};

/** Start the browser; `packages` is the node_modules with playwright-core. */
export async function launch(packages, { webgpu = false } = {}) {
  const { chromium } = createRequire(resolve(packages, "_.js"))("playwright-core");
  const executablePath = process.env.CHROMIUM ?? USUAL.find(existsSync);
  if (!executablePath) throw new Error("Chromium is not installed");
  return chromium.launch({ executablePath, args: [...FLAGS, ...(webgpu ? SOFTWARE_WEBGPU : ["--disable-gpu"])] });
}

/** Serve folders by URL prefix, {"/ort/": "...", "/": "..."}; return the server and its address. */
export function serve(folders) {
  const server = createServer((request, response) => {
    const path = decodeURIComponent(new URL(request.url, "http://localhost").pathname);
    const prefix = Object.keys(folders).find((p) => path.startsWith(p));
    const file = prefix && join(folders[prefix], path.slice(prefix.length));
    const found = file && !path.includes("..") && existsSync(file) && !path.endsWith("/");
    response.writeHead(found ? 200 : path === "/" ? 200 : 404, {
      "Content-Type": path === "/" ? "text/html" : (TYPES[extname(path)] ?? "application/octet-stream"),
      "Cross-Origin-Opener-Policy": "same-origin",
      "Cross-Origin-Embedder-Policy": "require-corp",
    });
    response.end(found ? readFileSync(file) : "");
  });
  return new Promise((done) =>
    server.listen(0, "127.0.0.1", () => done([server, `http://localhost:${server.address().port}`])),
  );
}

"""Makes the pages that train in the browser, on digits and on texts of a language model, and serves them.

Run with ``make web``, or with ``python -m examples.web`` once ``make browser`` has installed onnxruntime-web. The
folder that it writes is all static files, for any web server.
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import gradgraph as gg
from gradgraph.cli.digits import network, split

HERE = Path(__file__).parent
PAGE, PACKAGES = HERE / "page", HERE / "page" / "node_modules"
TEACH, LANGUAGE_MODEL = "teach", HERE.parent / "tiny_llama_int4.onnx"
# what the page that teaches loads of Hugging Face's packages
TEXTS = {"tokenizers.js": "tokenizers/dist/tokenizers.min.mjs", "jinja.js": "jinja/dist/index.js"}
# tokens of the language model, which are characters
SPECIAL, LETTERS = ("<pad>", "<s>", "</s>"), [chr(code) for code in range(ord(" "), ord("~") + 1)]
# what the page loads of onnxruntime-web: a script for each provider, and the WebAssembly under it
ONNXRUNTIME = {
    "wasm": ("ort.wasm.min.mjs", "ort-wasm-simd-threaded"),
    "webgpu": ("ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify"),
}
BACKENDS = {"wasm": "web", "webgpu": "web-gpu"}  # what the steps of the two providers are built for
LARGE = ".wasm"  # files that are kept for use without a network when they were used, and not before
TYPES = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
}
# SharedArrayBuffer, and with it threads in WebAssembly, is for pages that are isolated from others
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cache-Control": "no-cache",
}


def make_site(folder: Path) -> None:
    """Write all files of the pages: their own, the library, onnxruntime-web, steps, and what they learn."""
    make_common(folder)
    make_digits(folder)
    make_teach(folder / TEACH)
    _list_files(folder)


def make_common(folder: Path) -> None:
    """What both pages load."""
    if not (PACKAGES / "onnxruntime-web").is_dir():
        sys.exit("onnxruntime-web is not installed: make browser")
    if folder.exists() and not (folder / "files.js").exists() and any(folder.iterdir()):
        sys.exit(f"'{folder}' holds something else; choose another --out")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(PAGE, folder, ignore=shutil.ignore_patterns("node_modules", "package*.json"))
    (folder / "gradgraph").mkdir()
    for path in HERE.glob("*.js"):
        shutil.copy(path, folder / "gradgraph")
    (folder / "ort").mkdir()
    for script, wasm in ONNXRUNTIME.values():
        for name in (script, f"{wasm}.mjs", f"{wasm}.wasm"):
            shutil.copy(PACKAGES / "onnxruntime-web" / "dist" / name, folder / "ort")


def make_digits(folder: Path) -> None:
    """A step for each provider, and the digits."""
    (folder / "steps").mkdir()
    for provider, backend in BACKENDS.items():
        step = gg.build(network(seed=0), "cross_entropy", gg.optim.adamw(1e-3), seed=0, backend=backend)
        step.save(folder / "steps" / provider)
    make_digits_file(folder)


def make_digits_file(folder: Path) -> None:
    """digits.bin: all digits, then all pixels, from 0 to 16."""
    learned, held_out = split()
    digits, images = (np.concatenate([held_out[n], learned[n]]) for n in ("target", "x"))
    content = digits.astype(np.uint8).tobytes() + (images * 16).round().astype(np.uint8).tobytes()
    (folder / "digits.bin").write_bytes(content)


def make_teach(folder: Path) -> None:
    """The page that teaches: a step with adapters on a tiny language model, its tokenizer and its chat template."""
    shutil.copytree(HERE / "teach", folder, ignore=shutil.ignore_patterns("texts"))
    (folder / "packages").mkdir()
    for name, path in TEXTS.items():
        shutil.copy(PACKAGES / "@huggingface" / path, folder / "packages" / name)
    adapted = gg.lora(LANGUAGE_MODEL, ["*attn*", "*mlp*", "lm_head"], rank=32)
    model = gg.surgery.language_model(adapted)
    step = gg.build(model, gg.losses.cross_entropy(axis=-1), gg.optim.adam(3e-3), seed=0, backend=BACKENDS["wasm"])
    step.save(folder / "model")
    write_texts(folder / "model")


def write_texts(folder: Path) -> None:
    """The tokenizer of the tiny language model, a token for each character, and what lies beside it."""
    shutil.copytree(HERE / "teach" / "texts", folder, dirs_exist_ok=True)
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *LETTERS])}
    added = [{"id": vocabulary[token], "content": token, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for token in SPECIAL]  # fmt: skip
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": "\n"}, "content": " "},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "?"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _list_files(folder: Path) -> None:
    """files.js: what the service worker keeps, and a version that changes with any of it."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and folder / TEACH not in p.parents)
    version = hashlib.sha256(b"".join(hashlib.sha256(p.read_bytes()).digest() for p in paths)).hexdigest()[:16]
    names = [p.relative_to(folder).as_posix() for p in paths if p.suffix != LARGE and p.name != "service-worker.js"]
    text = f"const VERSION = {json.dumps(version)};\nconst FILES = {json.dumps(['./', *names], indent=1)};\n"
    (folder / "files.js").write_text(text)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Static files with the types and headers that WebAssembly and its threads need."""

    extensions_map: ClassVar[dict[str, str]] = {**http.server.SimpleHTTPRequestHandler.extensions_map, **TYPES}

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of files that are there."""


def serve(folder: Path, port: int) -> http.server.ThreadingHTTPServer:
    """A server for this machine alone; port 0 takes any."""
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, directory=str(folder)))


def write_and_serve(name: str, about: str | None, make: Callable[[Path], object], pages: str = "/") -> None:
    """Parse the command line of ``python -m examples.<name>``, write the site by ``make``, and serve it."""
    parser = argparse.ArgumentParser(prog=f"python -m examples.{name}", description=about)
    parser.add_argument("--out", type=Path, default=Path("build") / name, help="the folder of the page")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--no-serve", action="store_true", help="write the folder and end")
    options = parser.parse_args()
    make(options.out)
    print(f"wrote {options.out}: static files, for any web server")
    if options.no_serve:
        return
    with serve(options.out, options.port) as server:
        print(f"open http://localhost:{server.server_port}{pages} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    write_and_serve("web", __doc__, make_site, f"/ or /{TEACH}/")

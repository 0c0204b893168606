"""Onnxruntime-web's CPU provider in WebAssembly."""

from browsing import main

if __name__ == "__main__":
    main("wasm")

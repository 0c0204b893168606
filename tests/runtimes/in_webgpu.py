"""Onnxruntime-web's WebGPU provider, on Chromium's software renderer."""

from browsing import main

if __name__ == "__main__":
    main("webgpu")

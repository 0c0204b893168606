"""Onnxruntime-web's older WebGPU provider, in JavaScript, on Chromium's software renderer."""

from browsing import main

if __name__ == "__main__":
    main("jsep")

"""Running steps with stock onnxruntime: sessions, bound state, data, the loop, checkpoints; entry point ``trainer``.

This package reads a step's manifest, and does not depend on the code that built the step.
"""

"""Running steps with stock onnxruntime: sessions, bound state, data, the loop, checkpoints; entry point ``trainer``.

This room reads a step's manifest, and does not depend on the code that built the step.
"""

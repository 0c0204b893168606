"""Running steps with stock onnxruntime: sessions, bound state, data, the loop, checkpoints; entry point ``trainer``.

This room reads a step's manifest, and knows nothing of how the step was built.
"""

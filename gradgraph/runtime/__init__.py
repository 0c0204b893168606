"""Running steps on stock onnxruntime: sessions, bound state, data, the loop, checkpoints; ``trainer`` is the door.

It reads a step's manifest, and knows nothing of how the step was written.
"""

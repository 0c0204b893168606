"""Running steps on stock onnxruntime: sessions, bound state, data, the trainer, checkpoints."""

"""The graphs: what training, eval and optimizer models hold, here and in onnxruntime-training."""

"""Contents of training, eval and optimizer models, here and in onnxruntime-training."""

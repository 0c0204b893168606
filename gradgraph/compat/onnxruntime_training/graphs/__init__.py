"""Graphs of training, eval and optimizer models, and conversion of those of onnxruntime-training."""

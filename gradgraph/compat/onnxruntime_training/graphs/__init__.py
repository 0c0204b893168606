"""Graphs of training, eval and optimizer models, and conversion of models written by onnxruntime-training."""

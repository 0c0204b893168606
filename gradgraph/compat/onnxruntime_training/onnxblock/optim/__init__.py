"""Optimizers as blocks."""

from gradgraph.compat.onnxruntime_training.onnxblock.optim.optimizer_blocks import SGD, AdamW, ClipGradNorm

__all__ = ["SGD", "AdamW", "ClipGradNorm"]

"""Blocks that append nodes to a model: losses, arithmetic, optimizers; as in ``onnxruntime.training.onnxblock``."""

from gradgraph.compat.onnxruntime_training.onnxblock import blocks, loss, optim
from gradgraph.compat.onnxruntime_training.onnxblock.blocks import Block
from gradgraph.compat.onnxruntime_training.onnxblock.checkpoint_utils import load_checkpoint_to_model, save_checkpoint
from gradgraph.compat.onnxruntime_training.onnxblock.model_accessor import base, custom_op_library, empty_base
from gradgraph.compat.onnxruntime_training.onnxblock.onnxblock import ForwardBlock, TrainingBlock

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]

"""Training: state, module, optimizer and schedule, as in ``onnxruntime.training.api``."""

from gradgraph.compat.onnxruntime_training.api.checkpoint_state import CheckpointState
from gradgraph.compat.onnxruntime_training.api.lr_scheduler import LinearLRScheduler
from gradgraph.compat.onnxruntime_training.api.stepping_optimizer import Optimizer
from gradgraph.compat.onnxruntime_training.api.trained_module import Module

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer"]

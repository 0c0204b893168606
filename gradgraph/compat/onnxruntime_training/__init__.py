"""A drop-in for ``onnxruntime.training``, which is not developed any more, on stock onnxruntime.

Only import lines change::

    from gradgraph.compat.onnxruntime_training import artifacts, onnxblock
    from gradgraph.compat.onnxruntime_training.api import CheckpointState, LinearLRScheduler, Module, Optimizer

``artifacts`` makes training, eval and optimizer models and a checkpoint; ``onnxblock`` composes losses and models;
``api`` trains. Checkpoints are those of onnxruntime-training, which each of both reads from the other. Optimizer models
and training models of its making are read, too: their forward part is kept, and gradients are written anew.
"""

from gradgraph.compat.onnxruntime_training import api, artifacts, onnxblock

__all__ = ["api", "artifacts", "onnxblock"]

"""A drop-in replacement for the discontinued ``onnxruntime.training``, on stock onnxruntime.

Only import lines change::

    from gradgraph.compat.onnxruntime_training import artifacts, onnxblock
    from gradgraph.compat.onnxruntime_training.api import CheckpointState, LinearLRScheduler, Module, Optimizer

``artifacts`` generates training, eval and optimizer models and a checkpoint; ``onnxblock`` composes losses and models;
``api`` trains. Checkpoints have the format of onnxruntime-training, for reading and writing. Optimizer models and
training models written by onnxruntime-training are supported, too: the forward part of a training model is kept, and
its gradients are generated again.
"""

from gradgraph.compat.onnxruntime_training import api, artifacts, onnxblock

__all__ = ["api", "artifacts", "onnxblock"]

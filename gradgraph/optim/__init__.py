"""Optimizers: chains of small transforms of gradients, with PyTorch's names, arguments and defaults.

``adamw(lr) = chain(scale_by_adam(), add_decayed_weights(wd), scale_by_learning_rate(lr))``. A learning rate is a
number (then it is an input of the step, fed per call, with that default) or a schedule of ``gradgraph.optim``
(``cosine``, ``linear``, ``warmup``, …), which becomes part of the graph.
"""

from gradgraph.optim.modifiers import add_decayed_weights, clip_by_global_norm, clip_by_value
from gradgraph.optim.recipes import adam, adamw, by_name, rmsprop, sgd
from gradgraph.optim.scaling import momentum, scale_by_adam, scale_by_learning_rate, scale_by_rms
from gradgraph.optim.schedules import Schedule, constant, cosine, exponential, linear, step_decay, warmup
from gradgraph.optim.transform import Context, Optimizer, Transform, chain, master_weights

__all__ = [
    "Context",
    "Optimizer",
    "Schedule",
    "Transform",
    "adam",
    "adamw",
    "add_decayed_weights",
    "by_name",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "constant",
    "cosine",
    "exponential",
    "linear",
    "master_weights",
    "momentum",
    "rmsprop",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_rms",
    "sgd",
    "step_decay",
    "warmup",
]

"""Activation functions as layers, with PyTorch's arguments and defaults."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from gradgraph.frontend import activations, pointwise
from gradgraph.frontend.function_layers import layer_of
from gradgraph.frontend.module import Module, Parameter, layers_in
from gradgraph.frontend.trace import TensorLike

layer = functools.partial(layer_of, __name__)

ReLU = layer("ReLU", activations.relu, "inplace")
ReLU6 = layer("ReLU6", activations.relu6, "inplace")
SELU = layer("SELU", activations.selu, "inplace")
SiLU = layer("SiLU", activations.silu, "inplace")
Mish = layer("Mish", activations.mish, "inplace")
Hardswish = layer("Hardswish", activations.hardswish, "inplace")
Hardsigmoid = layer("Hardsigmoid", activations.hardsigmoid, "inplace")
Sigmoid = layer("Sigmoid", activations.sigmoid)
LogSigmoid = layer("LogSigmoid", activations.logsigmoid)
Tanh = layer("Tanh", pointwise.tanh)
Tanhshrink = layer("Tanhshrink", activations.tanhshrink)
Softsign = layer("Softsign", activations.softsign)
LeakyReLU = layer("LeakyReLU", activations.leaky_relu, "negative_slope inplace")
ELU = layer("ELU", activations.elu, "alpha inplace")
CELU = layer("CELU", activations.celu, "alpha inplace")
GELU = layer("GELU", activations.gelu, "approximate")
Hardtanh = layer("Hardtanh", activations.hardtanh, "min_val max_val inplace")
Softplus = layer("Softplus", activations.softplus, "beta threshold")
Softshrink = layer("Softshrink", activations.softshrink, "lambd")
Hardshrink = layer("Hardshrink", activations.hardshrink, "lambd")
Threshold = layer("Threshold", activations.threshold, "threshold value inplace")
GLU = layer("GLU", activations.glu, "dim")
Softmax = layer("Softmax", activations.softmax, "dim")
LogSoftmax = layer("LogSoftmax", activations.log_softmax, "dim")
Softmin = layer("Softmin", activations.softmin, "dim")


class PReLU(Module):
    """Leaky ReLU with one trained slope, or one per channel."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25) -> None:
        super().__init__()
        self.weight = Parameter(np.full(num_parameters, init, np.float32))

    def forward(self, x: TensorLike) -> Any:
        return activations.prelu(x, self.weight)


if not TYPE_CHECKING:
    __all__ = layers_in(globals())

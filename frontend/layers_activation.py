"""Activation functions as layers, with PyTorch's arguments and defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from gradgraph.frontend import activations, pointwise
from gradgraph.frontend.module import Module, Parameter
from gradgraph.frontend.trace import TensorLike

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "GLU",
    "SELU",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LeakyReLU",
    "LogSigmoid",
    "LogSoftmax",
    "Mish",
    "PReLU",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softmin",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Tanh",
    "Tanhshrink",
    "Threshold",
]


class _Function(Module):
    """A function of one tensor with fixed options."""

    function: ClassVar[Callable[..., Any]]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: TensorLike) -> Any:
        return type(self).function(x, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.options.items())


class _Plain(_Function):
    """A function without options."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()


class ReLU(_Plain):
    """``max(x, 0)``."""

    function = staticmethod(activations.relu)


class ReLU6(_Plain):
    """``min(max(x, 0), 6)``."""

    function = staticmethod(activations.relu6)


class SELU(_Plain):
    """The self-normalising exponential unit."""

    function = staticmethod(activations.selu)


class SiLU(_Plain):
    """``x * sigmoid(x)``."""

    function = staticmethod(activations.silu)


class Mish(_Plain):
    """``x * tanh(softplus(x))``."""

    function = staticmethod(activations.mish)


class Hardswish(_Plain):
    """``x * relu6(x + 3) / 6``."""

    function = staticmethod(activations.hardswish)


class Hardsigmoid(_Plain):
    """``relu6(x + 3) / 6``."""

    function = staticmethod(activations.hardsigmoid)


class Sigmoid(_Plain):
    """``1 / (1 + exp(-x))``."""

    function = staticmethod(activations.sigmoid)


class LogSigmoid(_Plain):
    """``log(sigmoid(x))``."""

    function = staticmethod(activations.logsigmoid)


class Tanh(_Plain):
    """``tanh(x)``."""

    function = staticmethod(pointwise.tanh)


class Tanhshrink(_Plain):
    """``x - tanh(x)``."""

    function = staticmethod(activations.tanhshrink)


class Softsign(_Plain):
    """``x / (1 + |x|)``."""

    function = staticmethod(activations.softsign)


class LeakyReLU(_Function):
    """``x`` above 0, ``negative_slope * x`` below."""

    function = staticmethod(activations.leaky_relu)

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False) -> None:
        super().__init__(negative_slope=negative_slope)


class ELU(_Function):
    """``x`` above 0, ``alpha * (exp(x) - 1)`` below."""

    function = staticmethod(activations.elu)

    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None:
        super().__init__(alpha=alpha)


class CELU(_Function):
    """``x`` above 0, ``alpha * (exp(x / alpha) - 1)`` below."""

    function = staticmethod(activations.celu)

    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None:
        super().__init__(alpha=alpha)


class GELU(_Function):
    """``x`` times the normal distribution function at ``x``; ``approximate`` is "none" or "tanh"."""

    function = staticmethod(activations.gelu)

    def __init__(self, approximate: str = "none") -> None:
        super().__init__(approximate=approximate)


class Hardtanh(_Function):
    """``x`` held between two bounds."""

    function = staticmethod(activations.hardtanh)

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> None:
        super().__init__(min_val=min_val, max_val=max_val)


class Softplus(_Function):
    """``log(1 + exp(beta * x)) / beta``."""

    function = staticmethod(activations.softplus)

    def __init__(self, beta: float = 1.0, threshold: float = 20.0) -> None:
        super().__init__(beta=beta, threshold=threshold)


class Softshrink(_Function):
    """``x`` moved towards 0 by ``lambd``, and 0 where it would cross."""

    function = staticmethod(activations.softshrink)

    def __init__(self, lambd: float = 0.5) -> None:
        super().__init__(lambd=lambd)


class Hardshrink(_Function):
    """``x`` outside ``[-lambd, lambd]``, else 0."""

    function = staticmethod(activations.hardshrink)

    def __init__(self, lambd: float = 0.5) -> None:
        super().__init__(lambd=lambd)


class Threshold(_Function):
    """``x`` above ``threshold``, else ``value``."""

    function = staticmethod(activations.threshold)

    def __init__(self, threshold: float, value: float, inplace: bool = False) -> None:
        super().__init__(threshold=threshold, value=value)


class GLU(_Function):
    """The first half along ``dim`` times the sigmoid of the second."""

    function = staticmethod(activations.glu)

    def __init__(self, dim: int = -1) -> None:
        super().__init__(dim=dim)


class Softmax(_Function):
    """Exponentials over their sum along ``dim``."""

    function = staticmethod(activations.softmax)

    def __init__(self, dim: int | None = None) -> None:
        super().__init__(dim=dim)


class LogSoftmax(_Function):
    """The logarithm of Softmax."""

    function = staticmethod(activations.log_softmax)

    def __init__(self, dim: int | None = None) -> None:
        super().__init__(dim=dim)


class Softmin(_Function):
    """Softmax of ``-x``."""

    function = staticmethod(activations.softmin)

    def __init__(self, dim: int | None = None) -> None:
        super().__init__(dim=dim)


class PReLU(Module):
    """LeakyReLU with slopes that are trained: one, or one per channel."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25) -> None:
        super().__init__()
        self.weight = Parameter(np.full(num_parameters, init, np.float32))

    def forward(self, x: TensorLike) -> Any:
        return activations.prelu(x, self.weight)

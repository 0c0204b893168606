"""Activation functions, under PyTorch's names with PyTorch's defaults."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gradgraph.errors import ModelError
from gradgraph.frontend.pointwise import real, where
from gradgraph.frontend.trace import TensorLike, op, tensor

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = [
    "celu",
    "elu",
    "gelu",
    "glu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "log_softmax",
    "logsigmoid",
    "mish",
    "prelu",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softmax",
    "softmin",
    "softplus",
    "softshrink",
    "softsign",
    "tanhshrink",
    "threshold",
]


def relu(x: TensorLike, inplace: bool = False) -> Tensor:
    """``max(0, x)``."""
    return op.Relu(tensor(x))


def relu6(x: TensorLike, inplace: bool = False) -> Tensor:
    """``min(max(0, x), 6)``."""
    return hardtanh(x, 0.0, 6.0)


def hardtanh(x: TensorLike, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """``x``, clamped to ``[min_val, max_val]``."""
    x = real(x)
    return op.Clip(x, tensor(min_val, x.dtype), tensor(max_val, x.dtype))


def leaky_relu(x: TensorLike, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """``x`` if positive, else ``negative_slope·x``."""
    return op.LeakyRelu(real(x), alpha=negative_slope)


def prelu(x: TensorLike, weight: TensorLike) -> Tensor:
    """Leaky ReLU with trained slopes: ``weight`` is one slope, or one per channel (axis 1)."""
    x, weight = real(x), tensor(weight)
    if weight.shape[0] != 1 and x.ndim > 2:
        weight = weight.reshape(-1, *[1] * (x.ndim - 2))
    return op.PRelu(x, weight)


def elu(x: TensorLike, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """``x`` if positive, else ``alpha·(eˣ − 1)``."""
    return op.Elu(real(x), alpha=alpha)


def celu(x: TensorLike, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """``max(0, x) + min(0, alpha·(e^(x/alpha) − 1))``."""
    return op.Celu(real(x), alpha=alpha)


def selu(x: TensorLike, inplace: bool = False) -> Tensor:
    """``1.0507·(max(0, x) + min(0, 1.6733·(eˣ − 1)))``."""
    return op.Selu(real(x))


def gelu(x: TensorLike, approximate: str = "none") -> Tensor:
    """``x·Φ(x)``, where ``Φ`` is the normal CDF; ``approximate="tanh"`` uses the tanh approximation."""
    return op.Gelu(real(x), approximate=approximate)


def silu(x: TensorLike, inplace: bool = False) -> Tensor:
    """``x·σ(x)``, also called swish."""
    x = real(x)
    return x * op.Sigmoid(x)


def mish(x: TensorLike, inplace: bool = False) -> Tensor:
    """``x·tanh(log(1 + eˣ))``."""
    return op.Mish(real(x))


def hardswish(x: TensorLike, inplace: bool = False) -> Tensor:
    """``x·min(max(x/6 + 1/2, 0), 1)``."""
    return op.HardSwish(real(x))


def hardsigmoid(x: TensorLike, inplace: bool = False) -> Tensor:
    """``min(max(x/6 + 1/2, 0), 1)``."""
    return op.HardSigmoid(real(x), alpha=1.0 / 6.0, beta=0.5)


def sigmoid(x: TensorLike) -> Tensor:
    """``1 / (1 + e⁻ˣ)``."""
    return op.Sigmoid(real(x))


def logsigmoid(x: TensorLike) -> Tensor:
    """``log σ(x)``."""
    return op.Neg(op.Softplus(op.Neg(real(x))))


def softplus(x: TensorLike, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """``log(1 + exp(beta * x)) / beta``, or ``x`` where ``beta * x > threshold``; in float32, both are equal
    above 20.
    """
    x = real(x)
    smooth = op.Softplus(x) if beta == 1.0 else op.Softplus(x * beta) * (1.0 / beta)
    return smooth if threshold >= 20.0 else where(x * beta > threshold, x, smooth)


def softsign(x: TensorLike) -> Tensor:
    """``x / (1 + |x|)``."""
    return op.Softsign(real(x))


def tanhshrink(x: TensorLike) -> Tensor:
    """``x − tanh(x)``."""
    x = real(x)
    return x - op.Tanh(x)


def softshrink(x: TensorLike, lambd: float = 0.5) -> Tensor:
    """``x`` moved towards 0 by ``lambd``; 0 if ``|x| ≤ lambd``."""
    return op.Shrink(real(x), lambd=lambd, bias=lambd)


def hardshrink(x: TensorLike, lambd: float = 0.5) -> Tensor:
    """``x`` if ``|x| > lambd``, else 0."""
    return op.Shrink(real(x), lambd=lambd, bias=0.0)


def threshold(x: TensorLike, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """``x`` if above ``threshold``, else ``value``."""
    x = real(x)
    return where(x > threshold, x, value)


def glu(x: TensorLike, dim: int = -1) -> Tensor:
    """The first half of ``x`` along ``dim``, multiplied by the sigmoid of the second half."""
    x = real(x)
    size = x.shape[dim]
    if not isinstance(size, int) or size % 2:
        raise ModelError(f"glu halves dimension {dim}, which has size {size}; it must be a fixed even number")
    a, b = x.chunk(2, dim)
    return a * op.Sigmoid(b)


def softmax(x: TensorLike, dim: int | None = None) -> Tensor:
    """``eˣ / Σ eˣ`` along ``dim``."""
    x = real(x)
    return op.Softmax(x, axis=_default_axis(x) if dim is None else dim)


def log_softmax(x: TensorLike, dim: int | None = None) -> Tensor:
    """``log softmax(x)`` along ``dim``."""
    x = real(x)
    return op.LogSoftmax(x, axis=_default_axis(x) if dim is None else dim)


def softmin(x: TensorLike, dim: int | None = None) -> Tensor:
    """``softmax(−x)`` along ``dim``."""
    return softmax(op.Neg(real(x)), dim)


def _default_axis(x: Tensor) -> int:
    """Return the axis along which PyTorch computes softmax of ``x`` if ``dim`` is None."""
    return 0 if x.ndim in (0, 1, 3) else 1


def gain(nonlinearity: str, param: float | None = None) -> float:
    """Return PyTorch's gain for an activation: the factor of the standard deviation of the weights before it.

    ``param`` is the negative slope of "leaky_relu", 0.01 by default.
    """
    if nonlinearity == "leaky_relu":
        return math.sqrt(2.0 / (1.0 + (0.01 if param is None else param) ** 2))
    gains = {"relu": math.sqrt(2.0), "tanh": 5.0 / 3.0, "selu": 0.75}
    linear = {"linear", "sigmoid", *(f"conv{n}d" for n in (1, 2, 3)), *(f"conv_transpose{n}d" for n in (1, 2, 3))}
    if nonlinearity not in gains and nonlinearity not in linear:
        raise ModelError(f"no gain is known for {nonlinearity!r}; use one of {', '.join(sorted({*gains, *linear}))}")
    return gains.get(nonlinearity, 1.0)

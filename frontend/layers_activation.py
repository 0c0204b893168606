"""Activation functions and losses as layers, with PyTorch's arguments and defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from gradgraph.frontend import activations, losses_classes, losses_values, pointwise
from gradgraph.frontend.module import Module, Parameter
from gradgraph.frontend.trace import TensorLike

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "GLU",
    "SELU",
    "BCELoss",
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "LeakyReLU",
    "LogSigmoid",
    "LogSoftmax",
    "MSELoss",
    "Mish",
    "NLLLoss",
    "PReLU",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "SmoothL1Loss",
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


# --- losses --------------------------------------------------------------------------------------


class _Loss(Module):
    """A loss with fixed options; ``forward(input, target)``."""

    function: ClassVar[Callable[..., Any]]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: TensorLike, target: TensorLike) -> Any:
        return type(self).function(x, target, **self.options)


class CrossEntropyLoss(_Loss):
    """Cross entropy of logits with class indices or probabilities."""

    function = staticmethod(losses_classes.cross_entropy)

    def __init__(
        self,
        weight: TensorLike | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(weight=weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)


class NLLLoss(_Loss):
    """Negative log-likelihood of class indices."""

    function = staticmethod(losses_classes.nll_loss)

    def __init__(self, weight: TensorLike | None = None, ignore_index: int = -100, reduction: str = "mean") -> None:
        super().__init__(weight=weight, ignore_index=ignore_index, reduction=reduction)


class MSELoss(_Loss):
    """Squared differences."""

    function = staticmethod(losses_values.mse_loss)

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)


class L1Loss(_Loss):
    """Absolute differences."""

    function = staticmethod(losses_values.l1_loss)

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)


class SmoothL1Loss(_Loss):
    """Squared differences near 0, absolute ones beyond ``beta``."""

    function = staticmethod(losses_values.smooth_l1_loss)

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(reduction=reduction, beta=beta)


class HuberLoss(_Loss):
    """SmoothL1Loss times ``delta``."""

    function = staticmethod(losses_values.huber_loss)

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction=reduction, delta=delta)


class BCEWithLogitsLoss(_Loss):
    """Binary cross entropy of logits."""

    function = staticmethod(losses_values.binary_cross_entropy_with_logits)

    def __init__(
        self, weight: TensorLike | None = None, reduction: str = "mean", pos_weight: TensorLike | None = None
    ) -> None:
        super().__init__(weight=weight, reduction=reduction, pos_weight=pos_weight)


class BCELoss(_Loss):
    """Binary cross entropy of probabilities."""

    function = staticmethod(losses_values.binary_cross_entropy)

    def __init__(self, weight: TensorLike | None = None, reduction: str = "mean") -> None:
        super().__init__(weight=weight, reduction=reduction)


class KLDivLoss(_Loss):
    """The Kullback-Leibler divergence of log-probabilities from a target distribution."""

    function = staticmethod(losses_values.kl_div)

    def __init__(self, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__(reduction=reduction, log_target=log_target)

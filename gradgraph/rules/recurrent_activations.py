"""The activation functions that RNN, GRU and LSTM select by name, with their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from gradgraph.errors import ModelError, shown
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import describe
from gradgraph.rules.rounding import wide


@dataclass(frozen=True)
class Kind:
    """An activation ``value(op, x, α, β)``, its derivative ``slope(op, x, y, α, β)``, and defaults of α and β."""

    value: Callable[[Builder, Var, float, float], Var]
    slope: Callable[[Builder, Var, Var, float, float], Var]
    alpha: float | None = None
    beta: float | None = None
    reads_input: bool = True  # False: the derivative depends on y only


def _either(op: Builder, condition: Var, yes: float, no: float, like: Var) -> Var:
    return op.Where(condition, op.const(yes, like.dtype), op.const(no, like.dtype))


_UNSAID = math.nan  # no default, because the specification and the runtimes disagree on it

KINDS = {
    "tanh": Kind(lambda op, x, a, b: op.Tanh(x), lambda op, x, y, a, b: 1.0 - y * y, reads_input=False),
    "sigmoid": Kind(lambda op, x, a, b: op.Sigmoid(x), lambda op, x, y, a, b: y * (1.0 - y), reads_input=False),
    "relu": Kind(lambda op, x, a, b: op.Relu(x), lambda op, x, y, a, b: op.cast(y > 0.0, y.dtype), reads_input=False),
    "affine": Kind(lambda op, x, a, b: x * a + b, lambda op, x, y, a, b: op.ones_like(y) * a, _UNSAID, _UNSAID),
    "leakyrelu": Kind(
        lambda op, x, a, b: op.LeakyRelu(x, alpha=a), lambda op, x, y, a, b: _either(op, x > 0.0, 1.0, a, x), 0.01
    ),
    "thresholdedrelu": Kind(
        lambda op, x, a, b: op.ThresholdedRelu(x, alpha=a),
        lambda op, x, y, a, b: op.cast(wide(op, x) > a, x.dtype),
        _UNSAID,
    ),
    "scaledtanh": Kind(
        lambda op, x, a, b: op.Tanh(x * b) * a,
        lambda op, x, y, a, b: (1.0 - op.Tanh(x * b) ** 2.0) * (a * b),
        _UNSAID,
        _UNSAID,
    ),
    "hardsigmoid": Kind(
        lambda op, x, a, b: op.HardSigmoid(x, alpha=a, beta=b),
        # comparing y is inexact only within rounding of an end of the ramp; comparing x would require recomputing x
        lambda op, x, y, a, b: _either(op, (y > 0.0) & (y < 1.0), a, 0.0, x),
        0.2,
        0.5,
    ),
    "elu": Kind(lambda op, x, a, b: op.Elu(x, alpha=a), lambda op, x, y, a, b: op.Where(x > 0.0, 1.0, y + a), 1.0),
    "softsign": Kind(lambda op, x, a, b: op.Softsign(x), lambda op, x, y, a, b: (op.Abs(x) + 1.0) ** -2.0),
    "softplus": Kind(lambda op, x, a, b: op.Softplus(x), lambda op, x, y, a, b: op.Sigmoid(x)),
}


@dataclass(frozen=True)
class Activation:
    """An activation function with its parameters, and the clip before it (gradient 1 on the closed interval)."""

    kind: Kind
    alpha: float
    beta: float
    clip: float | None

    def value(self, op: Builder, x: Var) -> Var:
        return self.kind.value(op, self._clipped(op, x), self.alpha, self.beta)

    def slope(self, op: Builder, x: Var, y: Var) -> Var:
        slope = self.kind.slope(op, self._clipped(op, x), y, self.alpha, self.beta)
        return slope if self.clip is None else op.Where(op.Abs(x) <= self.clip, slope, 0.0)

    @property
    def reads_input(self) -> bool:
        return self.kind.reads_input or self.clip is not None

    def _clipped(self, op: Builder, x: Var) -> Var:
        return x if self.clip is None else op.Clip(x, -self.clip, self.clip)


def activations(node: ir.Node, names: Sequence[str], attrs: dict[str, Any]) -> list[Activation]:
    """Return the functions called ``names`` (case does not matter), with parameters from the attributes.

    The numbers in activation_alpha and activation_beta are assigned, in order, to the functions that have α and β.

    Raises:
        ModelError: a function is unknown, or omits parameters for which runtimes have different defaults.
    """
    alphas, betas = iter(attrs.get("activation_alpha", [])), iter(attrs.get("activation_beta", []))
    found = []
    for name in names:
        kind = KINDS.get(name.lower())
        if kind is None:
            raise ModelError(
                f"{describe(node)} has the activation '{shown(name)}', which ONNX does not define; use one of "
                f"{', '.join(KINDS)}"
            )
        alpha, beta = (d if d is None else next(rest, d) for d, rest in ((kind.alpha, alphas), (kind.beta, betas)))
        if math.isnan(alpha or 0.0) or math.isnan(beta or 0.0):
            raise ModelError(
                f"{describe(node)} omits parameters of the activation {shown(name)}, for which runtimes have "
                "different defaults; set activation_alpha and activation_beta on the node"
            )
        found.append(Activation(kind, alpha or 0.0, beta or 0.0, attrs.get("clip")))
    return found

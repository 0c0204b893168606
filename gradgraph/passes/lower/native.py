"""Native kernels (``gradgraph/native``): the first choice where a Trainer has them.

A row writes one node of their domain, and serves in float32 only; the kernel itself refuses what does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.builder import Builder, Var
from gradgraph.native import DOMAIN
from gradgraph.passes.lower.table import ORT_CPU_NATIVE, form
from gradgraph.registry import case, positive, real, uniform

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
    return tuple(op.wrap(out) for out in node.outputs)


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

"""Forms and rewrites for tract."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from gradgraph.backends.backend import Lowering
from gradgraph.backends.capability import lacking
from gradgraph.backends.forms import Forms
from gradgraph.backends.shared_forms import TRAINING, VECTORS
from gradgraph.backends.shared_rewrites import PART_SLICES, TURN_SCANS
from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.norm import columns, inverse_deviation
from gradgraph.rules.registry import case, real

FORMS = Forms(TRAINING)


@FORMS.add(
    "BatchNormalization",
    case(real(4, 3), *VECTORS),
    case(real(2, 3, 4, 2), *VECTORS, epsilon=0.1),
    when=lacking("tract"),
)
def batch_norm_by_statistics(
    op: Builder,
    x: Var,
    scale: Var,
    bias: Var,
    mean: Var,
    var: Var,
    *,
    epsilon: float = 1e-5,
    training_mode: int = 0,
    **_: Any,
) -> Var | None:
    """Write BatchNormalization in evaluation mode by its formula, as tract requires constant statistics.

    None in training mode, or unless x is float32 of known rank.
    """
    if training_mode or x.shape is None or x.dtype != ir.DataType.FLOAT:
        return None
    slope = scale * inverse_deviation(op, var, epsilon)
    return op.like((x - columns(op, mean, x)) * columns(op, slope, x) + columns(op, bias, x), x)


LOWERING = Lowering(forms=FORMS, after=(TURN_SCANS,), last=(PART_SLICES,))

"""Rewrite GroupNormalization as InstanceNormalization of groups, which runtimes compute faster and more accurately.

onnxruntime's CPU provider has no kernel for GroupNormalization and runs ONNX's function body, which computes the
variance as E[x²] − E[x]²: if means are 100 times the deviations, four digits are lost, and the result may be negative.
The kernel of InstanceNormalization subtracts the mean first and is three times as fast.

GroupNormalization has a gradient rule of its own, so this pass runs after differentiation.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.normal.edit import Editor, attributes, calls_of

FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE


def write_groups(model: ir.Model) -> None:
    """Replace every GroupNormalization of known rank and element type with InstanceNormalization, in place."""
    editor = Editor(model)
    for node in calls_of(model, "GroupNormalization"):
        x, scale, bias = (Var(editor.op, v) for v in node.inputs if v is not None)
        if x.shape is not None and x.value.dtype is not None:
            editor.op.scope = node.name or ""
            editor.replace(node, _by_groups(editor.op, x, scale, bias, **attributes(node)))


def _by_groups(
    op: Builder, x: Var, scale: Var, bias: Var, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Var:
    """Compute the norm in float32 or float64, which is at least as precise as every ``stash_type``."""
    wide = DOUBLE if x.dtype == DOUBLE else FLOAT
    rows = op.Reshape(op.cast(x, wide), [0, num_groups, -1])
    normal = op.Reshape(_standardized(op, rows, num_groups, epsilon), op.shape(x))
    channel = list(range(1, x.rank - 1))
    scale, bias = (op.cast(op.Unsqueeze(v, channel) if channel else v, wide) for v in (scale, bias))
    return op.like(op.cast(normal * scale + bias, x.dtype), x)


def _standardized(op: Builder, rows: Var, num_groups: int, epsilon: float) -> Var:
    if rows.dtype == DOUBLE:  # not supported by the kernel of InstanceNormalization
        centred = rows - op.ReduceMean(rows, [-1], keepdims=1)
        return centred / op.Sqrt(op.ReduceMean(centred * centred, [-1], keepdims=1) + epsilon)
    ones, zeros = (op.const(np.full(num_groups, v, np.float32)) for v in (1, 0))
    return op.InstanceNormalization(rows, ones, zeros, epsilon=epsilon)

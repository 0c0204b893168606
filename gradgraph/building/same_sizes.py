"""Size checks: targets and sample weights must be as long as their predictions, or the step does not run.

Element-wise operators broadcast an axis of length 1, silently: a target of one row would be used for all rows. Every
runtime checks sizes that the file declares, and a ``Trainer`` those with symbolic names; the others are compared in the
graph itself: Split rejects parts that do not add up to the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from gradgraph.autodiff.shared_sizes import COMPARED
from gradgraph.graph.builder import Var
from gradgraph.graph.shapes import record_shape, shape_of


def named_sizes(graph: ir.Graph) -> frozenset[str]:
    """Return the symbolic sizes of the inputs of ``graph``."""
    shapes = [shape_of(v) for v in graph.inputs]
    return frozenset(d for shape in shapes for d in shape or () if isinstance(d, str))


def same_sizes(x: Var, like: Var, axes: Sequence[int | None], checked: Collection[str]) -> Var:
    """Return ``x``, checked at run time: axis ``i`` must be as long as axis ``axes[i]`` of ``like``.

    Args:
        axes: one for each axis of ``x``; None to accept any length.
        checked: symbolic sizes that are compared before the graph runs.
    """
    op, sizes = x.op, x.shape or (None,) * x.rank
    name = f"{x.value.name}{COMPARED}{like.value.name}"
    for i, axis in enumerate(axes):
        if axis is not None and not isinstance(sizes[i], int) and sizes[i] not in checked:
            x = op.emit("Split", x, op.dim(like, axis), name=name, axis=i)
            record_shape(x.value, sizes)
    return x

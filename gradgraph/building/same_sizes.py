"""Size checks in the graph: targets and sample weights must have the same length as predictions.

Without a check, element-wise operators would silently broadcast a target of one row to all rows. Runtimes check the
fixed sizes of inputs, and a ``Trainer`` checks symbolic sizes. Sizes that are neither are checked in the graph by a
Split, which fails unless its parts add up to the length of the axis.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from gradgraph.autodiff.shared_sizes import COMPARED
from gradgraph.graph.builder import Var
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import record_shape


def named_sizes(graph: ir.Graph) -> frozenset[str]:
    """Return the symbolic sizes of the inputs of ``graph``."""
    shapes = [shape_of(v) for v in graph.inputs]
    return frozenset(d for shape in shapes for d in shape or () if isinstance(d, str))


def same_sizes(x: Var, like: Var, axes: Sequence[int | None], checked: Collection[str]) -> Var:
    """Return ``x`` after a check at run time that its axis ``i`` is as long as the axis ``axes[i]`` of ``like``.

    An axis for which ``axes`` has None may have any length. Symbolic sizes in ``checked`` need no check, because the
    ``Trainer`` compares them before the graph runs.
    """
    op, sizes = x.op, x.shape or (None,) * x.rank
    name = f"{x.value.name}{COMPARED}{like.value.name}"
    for i, axis in enumerate(axes):
        if axis is not None and not isinstance(sizes[i], int) and sizes[i] not in checked:
            x = op.emit("Split", x, op.dim(like, axis), name=name, axis=i)
            record_shape(x.value, sizes)
    return x

"""Targets and weights of samples are as long as the predictions that they belong to, or the step does not run.

Element-wise operators repeat an axis of length 1, silently: a target of one row would stand for all rows. Sizes that
the file says are checked by every runtime, and those that an input has a name for by a ``Trainer``; the others are
compared by the graph itself: Split refuses parts that are not as long as the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from gradgraph.autodiff.shared_sizes import COMPARED
from gradgraph.graph.builder import Var
from gradgraph.graph.shapes import record_shape, shape_of


def named_sizes(graph: ir.Graph) -> frozenset[str]:
    """The names that inputs of ``graph`` have for sizes."""
    shapes = [shape_of(v) for v in graph.inputs]
    return frozenset(d for shape in shapes for d in shape or () if isinstance(d, str))


def same_sizes(x: Var, like: Var, axes: Sequence[int | None], checked: Collection[str]) -> Var:
    """``x``; where it is run, axis ``i`` of it is as long as axis ``axes[i]`` of ``like``.

    Args:
        axes: one for each axis of ``x``, None where it has a length of its own.
        checked: names for sizes that are compared before the graph runs.
    """
    op, sizes = x.op, x.shape or (None,) * x.rank
    name = f"{x.value.name}{COMPARED}{like.value.name}"
    for i, axis in enumerate(axes):
        if axis is not None and not isinstance(sizes[i], int) and sizes[i] not in checked:
            x = op.emit("Split", x, op.dim(like, axis), name=name, axis=i)
            record_shape(x.value, sizes)
    return x

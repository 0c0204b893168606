"""Forms and rewrites for tinygrad."""

from __future__ import annotations

from gradgraph.backends.backend import Lowering
from gradgraph.backends.forms import Forms
from gradgraph.backends.shared_forms import TRAINING_WITH_STATISTICS
from gradgraph.backends.shared_rewrites import NARROW_NUMBERS
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import all_sizes
from gradgraph.rules.registry import case, real

FORMS = Forms(TRAINING_WITH_STATISTICS)


@FORMS.add("Gather", case(real(4, 5, 2), [[0, 2, 1], [1, 3, 0]], axis=1))
def along_a_line(op: Builder, x: Var, indices: Var, *, axis: int = 0) -> Var | None:
    """Write a Gather with its constant indices as a vector, as tinygrad does not support indices with several axes.

    None if the indices are not constant or already a vector, or a size of x is unknown.
    """
    known, dims = indices.const, all_sizes(x.shape)
    if known is None or known.ndim < 2 or dims is None:
        return None
    axis %= x.rank
    found = op.Gather(x, op.const(known.reshape(-1)), axis=axis)
    return op.Reshape(found, [*dims[:axis], *known.shape, *dims[axis + 1 :]])


LOWERING = Lowering(forms=FORMS, after=(NARROW_NUMBERS,))

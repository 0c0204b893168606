"""tinygrad, which writes kernels while it runs."""

from __future__ import annotations

from gradgraph.backends.backend import Backend
from gradgraph.backends.forms import Forms
from gradgraph.backends.shared_forms import (
    STATISTICS,
    TRAINING_NORMS,
    compared_winners,
    reads_statistics,
    written_out_batch_norm,
    written_out_layer_norm,
)
from gradgraph.backends.shared_rewrites import NARROW_NUMBERS
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import all_sizes
from gradgraph.rules.registry import case, real

FORMS = Forms()
FORMS.add("MaxPoolGrad")(compared_winners)
FORMS.add("BatchNormalization", *TRAINING_NORMS, domain="")(written_out_batch_norm)
FORMS.add("LayerNormalization", *STATISTICS, domain="", when=reads_statistics)(written_out_layer_norm)


@FORMS.add("Gather", case(real(4, 5, 2), [[0, 2, 1], [1, 3, 0]], axis=1), domain="")
def along_a_line(op: Builder, x: Var, indices: Var, *, axis: int = 0) -> Var | None:
    """Constant indices of several axes are none that its Gather takes: as a vector, they are."""
    known, dims = indices.const, all_sizes(x.shape)
    if known is None or known.ndim < 2 or dims is None:
        return None
    axis %= x.rank
    found = op.Gather(x, op.const(known.reshape(-1)), axis=axis)
    return op.Reshape(found, [*dims[:axis], *known.shape, *dims[axis + 1 :]])


TINYGRAD = Backend(
    name="tinygrad",
    about="standard nodes that tinygrad has, for fixed sizes and no loops",
    forms=FORMS,
    after=(NARROW_NUMBERS,),
)

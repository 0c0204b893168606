"""The backend ``tinygrad``: tinygrad, which generates kernels at run time."""

from gradgraph.backends.backend import Backend, lowering_in

TINYGRAD = Backend(
    name="tinygrad",
    about="standard nodes that tinygrad supports, for fixed sizes and no loops",
    load=lowering_in(f"{__name__}.tinygrad_lowering"),
)

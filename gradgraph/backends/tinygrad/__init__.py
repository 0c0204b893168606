"""tinygrad, which writes kernels while it runs."""

from __future__ import annotations

from gradgraph.backends.backend import Backend, lowering_of

TINYGRAD = Backend(
    name="tinygrad",
    about="standard nodes that tinygrad has, for fixed sizes and no loops",
    load=lowering_of(__name__),
)

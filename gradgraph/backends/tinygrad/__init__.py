"""tinygrad, which writes kernels while it runs."""

from __future__ import annotations

from gradgraph.backends.backend import Backend, Lowering


def _lowering() -> Lowering:
    from gradgraph.backends.tinygrad.lowering import LOWERING

    return LOWERING


TINYGRAD = Backend(
    name="tinygrad",
    about="standard nodes that tinygrad has, for fixed sizes and no loops",
    load=_lowering,
)

"""tract, an inference library in Rust."""

from __future__ import annotations

from gradgraph.backends.backend import Backend, Lowering


def _lowering() -> Lowering:
    from gradgraph.backends.tract.lowering import LOWERING

    return LOWERING


TRACT = Backend(
    name="tract",
    about="standard nodes that tract, a runtime in Rust, has, for fixed sizes",
    load=_lowering,
)

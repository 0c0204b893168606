"""The backend ``portable``: standard nodes only, for runtimes without model-local functions."""

from __future__ import annotations

from gradgraph.backends.backend import Backend, Lowering


def _lowering() -> Lowering:
    from gradgraph.backends.shared_rewrites import PART_OUTPUTS, PART_SLICES

    return Lowering(last=(PART_SLICES, PART_OUTPUTS))


PORTABLE = Backend(
    name="portable", about="standard nodes only, for runtimes without functions", load=_lowering, for_all=True
)

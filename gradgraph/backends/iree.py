"""IREE, which compiles models with MLIR. It takes the direction of a Scan for forward without saying so."""

from __future__ import annotations

from gradgraph.backends.backend import Backend, Lowering


def _lowering() -> Lowering:
    from gradgraph.backends.shared_forms import TRAINING
    from gradgraph.backends.shared_rewrites import NARROW_NUMBERS, TURN_SCANS

    return Lowering(forms=TRAINING, after=(NARROW_NUMBERS, TURN_SCANS))


IREE = Backend(name="iree", about="standard nodes that IREE has, for fixed sizes", load=_lowering)

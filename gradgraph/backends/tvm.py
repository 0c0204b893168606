"""TVM, which compiles models by Relax. LayerNormalization's mean and deviation are zeros there without a word."""

from __future__ import annotations

from gradgraph.backends.backend import Backend, Lowering


def _lowering() -> Lowering:
    from gradgraph.backends.shared_forms import TRAINING_WITH_STATISTICS
    from gradgraph.backends.shared_rewrites import NARROW_NUMBERS

    return Lowering(forms=TRAINING_WITH_STATISTICS, after=(NARROW_NUMBERS,))


TVM = Backend(name="tvm", about="standard nodes that TVM has, for fixed sizes and no loops", load=_lowering)

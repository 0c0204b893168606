"""The backend ``tvm``: TVM, which compiles models by Relax.

TVM silently returns zeros as LayerNormalization's mean and deviation.
"""

from __future__ import annotations

from gradgraph.backends.backend import Backend, Lowering


def _lowering() -> Lowering:
    from gradgraph.backends.shared_forms import TRAINING_WITH_STATISTICS
    from gradgraph.backends.shared_rewrites import NARROW_NUMBERS

    return Lowering(forms=TRAINING_WITH_STATISTICS, after=(NARROW_NUMBERS,))


TVM = Backend(name="tvm", about="standard nodes that TVM supports, for fixed sizes and no loops", load=_lowering)

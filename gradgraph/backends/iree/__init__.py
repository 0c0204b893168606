"""IREE, which compiles models with MLIR.

It takes the direction of a Scan for forward without saying so, and no transposed convolution of each channel alone.
"""

from __future__ import annotations

from gradgraph.backends.backend import Backend, lowering_in

IREE = Backend(
    name="iree",
    about="standard nodes that IREE has, for fixed sizes",
    load=lowering_in(f"{__name__}.iree_lowering"),
)

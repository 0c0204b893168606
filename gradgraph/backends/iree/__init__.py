"""IREE, which compiles models with MLIR.

It silently reads every direction of a Scan as forward, and has no depthwise transposed convolution.
"""

from __future__ import annotations

from gradgraph.backends.backend import Backend, lowering_in

IREE = Backend(
    name="iree",
    about="standard nodes that IREE supports, for fixed sizes",
    load=lowering_in(f"{__name__}.iree_lowering"),
)

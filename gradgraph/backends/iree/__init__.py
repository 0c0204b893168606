"""The backend ``iree``: IREE, which compiles models with MLIR.

IREE silently runs Scans in reverse as forward ones, and has no depthwise transposed convolution.
"""

from gradgraph.backends.backend import Backend, lowering_in

IREE = Backend(
    name="iree",
    about="standard nodes that IREE supports, for fixed sizes",
    load=lowering_in(f"{__name__}.iree_lowering"),
)

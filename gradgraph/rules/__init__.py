"""Gradient rules by family. Importing this package fills ``gradgraph.registry``; its table of contents:"""

from gradgraph.rules import (
    activation,
    conv,
    elementwise,
    indexing,
    linalg,
    norm,
    padding,
    pool,
    random,
    recurrent,
    reduction,
    resize,
    shape,
    signal,
    softmax,
    spatial,
)

__all__ = [
    "activation",
    "conv",
    "elementwise",
    "indexing",
    "linalg",
    "norm",
    "padding",
    "pool",
    "random",
    "recurrent",
    "reduction",
    "resize",
    "shape",
    "signal",
    "softmax",
    "spatial",
]

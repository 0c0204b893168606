"""Gradient rules by family, and composites, named below. Importing this module fills the tables of both."""

# ruff: noqa: F401
from gradgraph.rules import (
    activation,
    control,
    conv,
    elementwise,
    indexing,
    linalg,
    ml,
    norm,
    padding,
    pool,
    quantize,
    random,
    recurrent,
    reduction,
    resize,
    sequence,
    shape,
    signal,
    softmax,
    spatial,
    spatial_rois,
)
from gradgraph.rules.composites import dot_product_attention, gated_units, log_probabilities, rms_norm

"""Gradient rules and composites by family. Importing this module fills both tables."""

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
    refused_operators,
    resize,
    sequence,
    shape,
    signal,
    softmax,
    spatial,
    spatial_rois,
)
from gradgraph.rules.composites import dot_product_attention, gated_units, log_probabilities, rms_norm

"""Operators that are not ONNX's own, written with those that are: fused, blocked, learned by other libraries."""

from gradgraph.passes.normal.dialects import (  # noqa: F401  (they fill the table)
    contrib_attention,
    contrib_recurrent,
    flex_attention,
    mixture_of_experts,
    ml_models,
    nchwc,
)

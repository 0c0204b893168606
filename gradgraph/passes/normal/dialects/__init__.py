"""Rewrite operators outside ONNX's own domain with standard ones: fused, and classical machine learning."""

from gradgraph.passes.normal.dialects import (  # noqa: F401  (they fill the table)
    contrib_attention,
    contrib_branches,
    contrib_packed,
    contrib_paged_attention,
    contrib_products,
    contrib_recurrent,
    contrib_sparse_attention,
    contrib_tables,
    contrib_twins,
    flex_attention,
    mixture_of_experts,
    ml_models,
)

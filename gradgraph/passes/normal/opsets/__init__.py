"""Convert operators of opsets 1 to 28 to opset 21, and models of opset 21 to older opsets."""

from gradgraph.passes.normal.opsets import attention_formula, linear_attention  # noqa: F401  (they fill the table)

"""Nothing wasteful stays in a model: known numbers are folded, equal nodes merge, peepholes write less."""

from gradgraph.passes.normal.simplifying import movement_peepholes, product_peepholes  # noqa: F401  (they fill the table)

"""Simplification: constants are folded, equal nodes merged, and patterns replaced by shorter ones."""

from gradgraph.passes.normal.simplifying import movement_peepholes, product_peepholes  # noqa: F401  (they fill the table)

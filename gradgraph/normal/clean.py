"""Nothing wasteful stays: what nobody reads, what is computed twice, what a peephole writes shorter."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.normal import movement
from gradgraph.normal.canonical import simplify
from gradgraph.normal.cse import merge_equal, name_outputs
from gradgraph.prune import prune

assert movement  # importing it adds to the table of peepholes


def clean_up(model: ir.Model) -> ir.Model:
    """Prune, merge and simplify ``model`` in place until peepholes make it no smaller, and return it."""
    prune(model)
    size = model.graph.num_nodes() + 1
    while model.graph.num_nodes() < size:
        size = merge_equal(model).graph.num_nodes()
        prune(simplify(model))
    return name_outputs(model)

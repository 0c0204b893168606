"""Nothing wasteful stays: what nobody reads, what is computed twice, what a peephole writes shorter."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.normal import movement, products
from gradgraph.normal.canonical import simplify
from gradgraph.normal.cse import merge_equal, name_outputs
from gradgraph.normal.edit import nodes_of
from gradgraph.normal.groups import write_groups
from gradgraph.normal.unsigned import write_unsigned
from gradgraph.prune import prune

_ROUNDS = 8  # two or three do; each is linear in the model
assert movement and products  # importing them adds to the table of peepholes


def clean_up(model: ir.Model) -> ir.Model:
    """Prune, merge and simplify ``model`` in place until no node changes, and return it."""
    prune(model)
    write_groups(model)
    for _ in range(_ROUNDS):
        before = list(nodes_of(model))
        prune(simplify(merge_equal(model)))
        if before == list(nodes_of(model)):
            break
    write_unsigned(model)
    return name_outputs(model)

"""Nothing wasteful stays: what nobody reads, what is computed twice, what a peephole writes shorter."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from gradgraph.graph.prune import prune
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.simplifying.cse import Keys, merge_equal, name_outputs
from gradgraph.passes.normal.simplifying.group_norms import write_groups
from gradgraph.passes.normal.simplifying.peepholes import simplify
from gradgraph.passes.normal.simplifying.unsigned import write_unsigned
from gradgraph.passes.rewrites import Rewrite, run

BEFORE = (
    Rewrite(prune, "whatever nobody reads needs no better form"),
    Rewrite(write_groups, "gradients, which have a rule for it, are written by now; equal parts of two can merge"),
)


AFTER = (
    Rewrite(write_unsigned, "the nodes around a QuantizeLinear, which it looks at, are final"),
    Rewrite(name_outputs, "nothing more merges, so an Identity before an output is only its name"),
)
_ROUNDS = 8  # two or three do; each is linear in the model


def clean_up(model: ir.Model) -> ir.Model:
    """Prune, merge and simplify ``model`` in place until no node changes, and return it."""
    run(BEFORE, model)
    keys: Keys = {}
    rewrites = (
        Rewrite(partial(merge_equal, keys=keys), "a peephole takes apart only what has one reader"),
        Rewrite(simplify, "equal nodes are one now; two that a peephole makes equal are merged in the next round"),
        Rewrite(prune, "a node that a peephole has gone round counts as a reader until it goes"),
    )
    for _ in range(_ROUNDS):
        before = list(nodes_of(model))
        run(rewrites, model)
        if before == list(nodes_of(model)):
            break
    run(AFTER, model)
    return model

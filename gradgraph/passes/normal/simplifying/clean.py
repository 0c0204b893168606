"""Simplification after differentiation: prune, merge common subexpressions, and apply peepholes."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from gradgraph.graph.prune import prune
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.simplifying.affected_nodes import Changes
from gradgraph.passes.normal.simplifying.cse import Keys, merge_equal, name_outputs
from gradgraph.passes.normal.simplifying.fragile_quantization import dequantize_outside, omit_dilations, write_unsigned
from gradgraph.passes.normal.simplifying.group_norms import write_groups
from gradgraph.passes.normal.simplifying.peepholes import simplify
from gradgraph.passes.rewrites import Rewrite, run

BEFORE = (
    Rewrite(prune, "unread nodes need not be rewritten"),
    Rewrite(write_groups, "differentiation, which has a rule for it, is done; equal parts of two nodes can then merge"),
)


AFTER = (
    Rewrite(write_unsigned, "it inspects the nodes around a QuantizeLinear, which are final now"),
    Rewrite(omit_dilations, "the nodes around a pool are final now, and no later rewrite sets defaults"),
    Rewrite(dequantize_outside, "equal nodes in several bodies are merged"),
    Rewrite(name_outputs, "no more nodes merge, so an Identity before an output only names it"),
)
_ROUNDS = 8  # two or three suffice; each is linear in the model


def clean_up(model: ir.Model) -> ir.Model:
    """Prune, merge and simplify ``model`` in place until no node changes, and return it."""
    run(BEFORE, model)
    keys: Keys = {}
    changes = Changes()
    rewrites = (
        Rewrite(partial(merge_equal, keys=keys), "peepholes rewrite only values with one reader after merging"),
        Rewrite(partial(simplify, changes=changes), "equal nodes are merged; nodes that become equal merge next"),
        Rewrite(prune, "a bypassed node counts as a reader until it is removed"),
    )
    nodes = list(nodes_of(model))
    for _ in range(_ROUNDS):
        before = nodes
        run(rewrites, model)
        nodes = list(nodes_of(model))
        if before == nodes:
            break
    run(AFTER, model)
    return model

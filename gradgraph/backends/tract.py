"""tract, an inference library in Rust."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.backends.backend import Backend
from gradgraph.backends.capability import lacking
from gradgraph.backends.forms import Forms
from gradgraph.backends.shared_forms import (
    EVALUATION_NORMS,
    TRAINING_NORMS,
    batch_norm_by_statistics,
    compared_winners,
    written_out_batch_norm,
)
from gradgraph.backends.shared_rewrites import TURN_SCANS
from gradgraph.graph.builder import Builder
from gradgraph.passes.normal.edit import names_of, nodes_of
from gradgraph.passes.rewrites import Rewrite

FORMS = Forms()
FORMS.add("MaxPoolGrad")(compared_winners)
FORMS.add("BatchNormalization", *TRAINING_NORMS, domain="")(written_out_batch_norm)
FORMS.add("BatchNormalization", *EVALUATION_NORMS, domain="", when=lacking("tract"))(batch_norm_by_statistics)


def part_scan_outputs(model: ir.Model) -> None:
    """Give what a Scan writes in each turn to nobody else in its body, in place: tract turns its shape there, too."""
    op = Builder(names_of(model))
    for node in nodes_of(model):
        if node.op_type != "Scan" or node.domain:
            continue
        body = node.attributes["body"].as_graph()
        states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
        for i, value in enumerate(body.outputs):
            if i >= states and value.uses():
                body.outputs[i] = op.Identity(op.wrap(value)).value
        body.extend(op.nodes)
        op.nodes = []


TRACT = Backend(
    name="tract",
    about="standard nodes that tract, a runtime in Rust, has, for fixed sizes",
    forms=FORMS,
    after=(TURN_SCANS,),
    last=(Rewrite(part_scan_outputs, "what a loop writes has no other reader in it"),),
)

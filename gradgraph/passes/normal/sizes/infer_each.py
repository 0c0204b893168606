"""Shape inference node by node, for a graph with known input sizes; faster than ONNX shape inference of a whole graph.

ONNX shape inference needs the graph as a protobuf message. In a step with a fixed batch size nearly all sizes are
recorded, and the others follow from the inputs of their node.
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph.checks import has_bodies
from gradgraph.graph.nodes import is_standard
from gradgraph.graph.shapes import POOLS, is_static, recorded_shape, reset_inference, shape_of
from gradgraph.passes.normal.edit import nodes_of


def infer_each(model: ir.Model) -> bool:
    """Record types and sizes, in place; return False if ``infer_shapes`` must be applied to the whole graph.

    That is necessary if a size does not follow from its node alone (a Reshape to computed sizes), if there are bodies,
    or if a node may have to be rewritten once sizes are known.
    """
    nodes = list(nodes_of(model))
    if any(has_bodies(node) or _may_be_rewritten(node) for node in nodes):
        return False
    return all(_is_known(value) for node in nodes for value in node.outputs if value.name)


def _may_be_rewritten(node: ir.Node) -> bool:
    """Whether ``infer_shapes`` may rewrite the node, or corrects ONNX's result for it."""
    if is_standard(node, *POOLS):
        return bool(node.attributes.get_int("ceil_mode", 0))
    return is_standard(node, "Attention", "Resize", "STFT", "Upsample")


def _is_known(value: ir.Value) -> bool:
    """Whether the type and all sizes of ``value`` are known after inference, which records only complete shapes."""
    if not is_static(recorded_shape(value)):
        recorded, value.shape = value.shape, None
        reset_inference([value])
        if not is_static(shape_of(value)):
            value.shape = recorded
            return False
    return value.type is not None

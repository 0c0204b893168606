"""Fusion of a blocked convolution with the following nodes: its kernel adds a tensor and applies an activation.

1. Add of a tensor → the fourth input of the convolution, whose kernel overwrites it. Nobody may read the tensor later,
   as a copy would take longer than the addition. Its other readers, if any, must be nodes that the convolution depends
   on, as in a norm's gradient, whose factors are sums over the cotangent;
2. Relu or Clip by known bounds → an attribute.

Each saves a pass: two convolutions of one tap, their sum and a Relu take half the time.
"""

from __future__ import annotations

from collections import deque

import onnx_ir as ir

from gradgraph.backends.ort_operators import BLOCKED
from gradgraph.graph.nodes import read_once
from gradgraph.graph.prune import detach
from gradgraph.graph.shapes import constant_of
from gradgraph.passes.normal.simplifying.peepholes import same_dims

MOST_NODES_BETWEEN = 256  # nodes searched for readers of a sum


def fuse_into_convolutions(graph: ir.Graph) -> None:
    """Rewrite ``graph`` in place."""
    gone = []  # removed together: each removal scans all outputs of the graph
    for node in [n for n in graph if n.domain == ""]:
        if (node.op_type == "Add" and _fuse_sum(graph, node)) or (
            node.op_type in ("Relu", "Clip") and _fuse_activation(node)
        ):
            detach(node)
            gone.append(node)
    graph.remove(gone, safe=True)


def _fuse_sum(graph: ir.Graph, node: ir.Node) -> bool:
    """Fuse ``Conv(x, w, b) + total`` to one node, if nobody reads ``total`` later: it is overwritten."""
    a, b = node.inputs
    for value, total in ((a, b), (b, a)):
        conv = _own_convolution(value, node)
        if conv is None or value is None or total is None or len(conv.inputs) > 3:
            continue
        if value is not total and same_dims(total, value) and _read_last(total, node, conv):
            conv.resize_inputs(4)
            conv.replace_input_with(3, total)
            graph.insert_before(node, conv)  # it moves after the node that computes the total
            node.outputs[0].replace_all_uses_with(conv.outputs[0])
            return True
    return False


def _read_last(total: ir.Value, node: ir.Node, conv: ir.Node) -> bool:
    """Whether all other readers of ``total`` run before ``conv``."""
    if total.is_graph_output() or total.producer() is None:
        return False
    others = {user for user, _ in total.uses()} - {node}
    return not others or others <= _before(conv, MOST_NODES_BETWEEN)


def _before(node: ir.Node, most: int) -> set[ir.Node]:
    """The nearest ``most`` nodes that ``node`` depends on."""
    found: set[ir.Node] = set()
    waiting = deque([node])
    while waiting and len(found) < most:
        makers = (v.producer() for v in waiting.popleft().inputs if v is not None)
        fresh = [n for n in dict.fromkeys(makers) if n is not None and n not in found]
        found.update(fresh)
        waiting.extend(fresh)
    return found


def _fuse_activation(node: ir.Node) -> bool:
    """Fuse ``Relu(Conv(…))`` or ``Clip(Conv(…))`` to one node."""
    conv, attributes = _own_convolution(node.inputs[0], node), _activation(node)
    if conv is None or attributes is None:
        return False
    conv.attributes.update({a.name: a for a in attributes})
    node.outputs[0].replace_all_uses_with(conv.outputs[0])
    return True


def _own_convolution(value: ir.Value | None, reader: ir.Node) -> ir.Node | None:
    """The convolution without an activation that computes ``value`` and has ``reader`` as its only reader."""
    conv = None if value is None else value.producer()
    if conv is None or value is None or (conv.domain, conv.op_type) != (BLOCKED, "Conv"):
        return None
    return conv if read_once(value, reader) and "activation" not in conv.attributes else None


def _activation(node: ir.Node) -> list[ir.Attr] | None:
    """The attributes for it; None for a Clip without two known bounds."""
    named = [ir.AttrString("activation", node.op_type)]
    if node.op_type == "Relu":
        return named
    bounds = clip_bounds(node)
    return None if bounds is None else [*named, ir.AttrFloat32s("activation_params", bounds)]


def clip_bounds(clip: ir.Node) -> list[float] | None:
    """The bounds of a Clip, if it has two and both are known."""
    bounds = [None if v is None else constant_of(v) for v in clip.inputs[1:]]
    known = [float(b.item()) for b in bounds if b is not None]
    return known if len(known) == 2 else None

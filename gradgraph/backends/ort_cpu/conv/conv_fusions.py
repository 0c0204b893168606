"""Fuse the nodes after a blocked convolution into it: its kernel can add a tensor and apply an activation.

1. Add of a tensor → the fourth input of the convolution. The kernel overwrites this tensor, so no node may read it
   later: onnxruntime would copy it, which takes longer than the addition. Other readers, if any, must be nodes that the
   convolution depends on, as in a norm's gradient, whose factors are sums over the cotangent;
2. Relu, or Clip by known bounds → an attribute.

Each fusion saves a pass: two convolutions of one tap, their sum and a Relu take half the time.
"""

from __future__ import annotations

from collections import deque

import onnx_ir as ir

from gradgraph.backends.ort_operators import BLOCKED
from gradgraph.graph.nodes import read_once
from gradgraph.graph.prune import detach
from gradgraph.graph.shapes import constant_of
from gradgraph.passes.normal.simplifying.peepholes import same_dims

MOST_NODES_BETWEEN = 256  # ancestors of a convolution that are searched for the readers of a tensor


def fuse_into_convolutions(graph: ir.Graph) -> None:
    """Fuse Add, Relu and Clip into NCHWc convolutions of ``graph``, in place."""
    gone = []  # removed together: each removal scans all outputs of the graph
    for node in [n for n in graph if n.domain == ""]:
        if (node.op_type == "Add" and _fuse_sum(graph, node)) or (
            node.op_type in ("Relu", "Clip") and _fuse_activation(node)
        ):
            detach(node)
            gone.append(node)
    graph.remove(gone, safe=True)


def _fuse_sum(graph: ir.Graph, node: ir.Node) -> bool:
    """Fuse ``Conv(x, w, b) + total`` into one node, if no node reads ``total`` later; return whether it was fused."""
    a, b = node.inputs
    for value, total in ((a, b), (b, a)):
        conv = _own_convolution(value, node)
        if conv is None or value is None or total is None or len(conv.inputs) > 3:
            continue
        if value is not total and same_dims(total, value) and _read_last(total, node, conv):
            conv.resize_inputs(4)
            conv.replace_input_with(3, total)
            graph.insert_before(node, conv)  # to follow the node that computes the total
            node.outputs[0].replace_all_uses_with(conv.outputs[0])
            return True
    return False


def _read_last(total: ir.Value, node: ir.Node, conv: ir.Node) -> bool:
    """Return whether all other readers of ``total`` run before ``conv``."""
    if total.is_graph_output() or total.producer() is None:
        return False
    others = {user for user, _ in total.uses()} - {node}
    return not others or others <= _before(conv, MOST_NODES_BETWEEN)


def _before(node: ir.Node, most: int) -> set[ir.Node]:
    """Return the nearest nodes, at most ``most``, that ``node`` depends on."""
    found: set[ir.Node] = set()
    waiting = deque([node])
    while waiting and len(found) < most:
        makers = (v.producer() for v in waiting.popleft().inputs if v is not None)
        fresh = [n for n in dict.fromkeys(makers) if n is not None and n not in found]
        found.update(fresh)
        waiting.extend(fresh)
    return found


def _fuse_activation(node: ir.Node) -> bool:
    """Fuse ``Relu(Conv(…))`` or ``Clip(Conv(…))`` into one node; return whether it was fused."""
    conv, attributes = _own_convolution(node.inputs[0], node), _activation(node)
    if conv is None or attributes is None:
        return False
    conv.attributes.update({a.name: a for a in attributes})
    node.outputs[0].replace_all_uses_with(conv.outputs[0])
    return True


def _own_convolution(value: ir.Value | None, reader: ir.Node) -> ir.Node | None:
    """Return the convolution without activation that computes ``value`` for ``reader`` only; else None."""
    conv = None if value is None else value.producer()
    if conv is None or value is None or (conv.domain, conv.op_type) != (BLOCKED, "Conv"):
        return None
    return conv if read_once(value, reader) and "activation" not in conv.attributes else None


def _activation(node: ir.Node) -> list[ir.Attr] | None:
    """Return the attributes by which a convolution applies activation ``node``; None for a Clip of unknown bounds."""
    named = [ir.AttrString("activation", node.op_type)]
    if node.op_type == "Relu":
        return named
    bounds = clip_bounds(node)
    return None if bounds is None else [*named, ir.AttrFloat32s("activation_params", bounds)]


def clip_bounds(clip: ir.Node) -> list[float] | None:
    """Return the bounds of a Clip; None unless it has two and both are known."""
    bounds = [None if v is None else constant_of(v) for v in clip.inputs[1:]]
    known = [float(b.item()) for b in bounds if b is not None]
    return known if len(known) == 2 else None

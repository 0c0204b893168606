"""Fuse connected elementwise nodes into one native node, which reads and writes each tensor once.

All nodes of a group have the same shape, and they are connected: they read each other's results, or the same tensor of
that shape. They also belong to the same stage (``stages.py``): on a path, the stage increases with each edge from an
elementwise node to a node that is not elementwise or has a different shape. Hence no node outside the group is on a
path between two of its nodes.

Booleans that are read outside the group are excluded, together with their readers, as are nodes that onnxruntime fuses
into the preceding product or convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from gradgraph.backends.ort_native.library import DOMAIN, MOST_AXES
from gradgraph.backends.ort_native.programs import BOOL, FLOAT, OPERATORS, Program
from gradgraph.backends.ort_native.strided import spreads
from gradgraph.backends.stages import stages
from gradgraph.graph.nodes import read_once
from gradgraph.graph.prune import detach, prune
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import Shape
from gradgraph.rules.registry import key_of

Shapes: TypeAlias = Mapping[ir.Node, Shape]  # types and shapes of eligible nodes
Group: TypeAlias = Sequence[ir.Node]  # in graph order

_PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})
# nodes that onnxruntime fuses into a product before them
_APPLIED = frozenset({"Add", "Clip", "HardSigmoid", "LeakyRelu", "Relu", "Sigmoid", "Softplus", "Tanh"})


def fuse_chains(model: ir.Model) -> None:
    """Fuse groups of elementwise nodes of the main graph into native nodes, in place."""
    graph = model.graph
    shapes = {node: shape for node in graph if (shape := _chain_shape(node)) is not None}
    groups = [group for group in _whole_groups(graph, shapes) if len(group) > 1]
    for group in groups:
        _write(graph, group)
    if groups:
        graph.remove([node for group in groups for node in group])  # one call, as each scans all graph outputs
        graph.sort()
        model.opset_imports.setdefault(DOMAIN, 1)
        prune(model)  # constants are in the programs now


# --- choice ------------------------------------------------------------------------------------------------------


def _chain_shape(node: ir.Node) -> Shape | None:
    """Return the shape of the output of ``node`` if the kernel supports the node, else None."""
    if key_of(node) not in OPERATORS or _is_applied_before(node):
        return None
    shape = shape_of(node.outputs[0])
    if shape is None or None in shape or len(shape) > MOST_AXES or all(d == 1 for d in shape):
        return None
    values = [v for v in (*node.inputs, *node.outputs) if v is not None]
    return shape if all(v.dtype in (FLOAT, BOOL) and spreads(shape_of(v), shape) for v in values) else None


def _is_applied_before(node: ir.Node) -> bool:
    """Return whether onnxruntime fuses ``node`` into the product before it, which no other node reads."""
    if node.domain != "" or node.op_type not in _APPLIED:
        return False
    before = [(x, x.producer()) for x in node.inputs if x is not None]
    return any(p is not None and p.domain == "" and p.op_type in _PRODUCTS and read_once(x, node) for x, p in before)


def _whole_groups(graph: ir.Graph, shapes: Shapes) -> list[Group]:
    """Return the groups after dropping nodes until no group reads or outputs a boolean."""
    while True:
        groups = list(_groups(graph, shapes))
        torn = {node for group in groups for node in _tied_to_outside(group)}
        if not torn:
            return groups
        shapes = {node: shape for node, shape in shapes.items() if node not in torn}


def _tied_to_outside(group: Group) -> Iterator[ir.Node]:
    """Yield nodes of ``group`` with a boolean input from outside the group, or a boolean output read outside."""
    own = set(group)
    for node in group:
        y = node.outputs[0]
        reads = any(x is not None and x.dtype == BOOL and x.producer() not in own for x in node.inputs)
        if reads or (y.dtype == BOOL and _is_read_outside(y, own)):
            yield node


def _is_read_outside(value: ir.Value, group: set[ir.Node]) -> bool:
    return value.is_graph_output() or any(node not in group for node, _ in value.uses())


def _groups(graph: ir.Graph, shapes: Shapes) -> Iterator[Group]:
    """Yield groups of nodes: nodes of one stage that use the same tensor of their shape are in one group."""
    stage = stages(graph, lambda before, node: before in shapes and shapes[before] != shapes.get(node))
    near: dict[object, object] = {}  # the parent, in the forest of groups, of each node and of each tensor in a stage

    def root(x: object) -> object:
        while (further := near.get(x, x)) is not x:
            near[x] = near.get(further, further)
            x = further
        return x

    for node, shape in shapes.items():
        for value in (*node.inputs, *node.outputs):
            if value is not None and shape_of(value) == shape:
                near[root(node)] = root((stage[node], value))
    groups: dict[object, list[ir.Node]] = {}
    for node in shapes:
        groups.setdefault(root(node), []).append(node)
    yield from groups.values()


# --- rewriting ---------------------------------------------------------------------------------------------------


def _write(graph: ir.Graph, group: Group) -> None:
    """Insert one node before ``group`` that returns the values read elsewhere, and detach the nodes of the group."""
    own = set(group)
    program = Program()
    for node in group:
        program.write(node)
    results = [node.outputs[0] for node in group if _is_read_outside(node.outputs[0], own)]
    fused = program.node(results)
    fused.name = group[-1].name
    graph.insert_before(group[0], fused)
    for old, new in zip(results, fused.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name = None
    for node in group:
        detach(node)

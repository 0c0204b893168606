"""Pass: replace an If whose condition is constant with the branch taken."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.shapes import Shape
from gradgraph.graph.size_context import better
from gradgraph.passes.normal.edit import Editor, calls_of, emptied, nodes_of
from gradgraph.passes.normal.sizes.infer import infer_shapes


def take_known_branches(model: ir.Model) -> bool:
    """Replace each If whose condition is constant with the branch taken; return True if there was one.

    1. The nodes of the branch move before the If, in their order; their names are already unique in the model.
    2. An If within the branch is handled in turn. The other branch is removed.
    3. Shapes are inferred again, because exporters may declare the shapes of one branch for the other: a recorded shape
       is kept only if it agrees with the inferred one.
    """
    editor = Editor(model)
    waiting = calls_of(model, "If")
    results: list[ir.Value] = []
    while waiting:
        node = waiting.pop()
        condition = shapes.constant_of(node.inputs[0])
        if condition is None or condition.size != 1 or node.graph is None:
            continue
        branch = node.attributes["then_branch" if condition.item() else "else_branch"].as_graph()
        taken = list(branch.outputs)
        results.extend(taken)
        editor.op.nodes.extend(emptied(branch))
        editor.replace(node, *map(editor.op.wrap, taken))
    if results:
        _infer_anew(model, results)
    return bool(results)


def _infer_anew(model: ir.Model, doubtful: Iterable[ir.Value]) -> None:
    """Infer all shapes again; recorded ones stay unless contradicted or of ``doubtful`` values, branch results."""
    ends = set(model.graph.outputs)
    values = [y for node in nodes_of(model) for y in node.outputs if y not in ends]
    recorded = {y: y.shape for y in values if y.shape is not None}
    for y in values:
        y.shape = None
    infer_shapes(model)
    for y in doubtful:
        recorded.pop(y, None)
    for y, shape in recorded.items():
        y.shape = shape if y.shape is None else ir.Shape(_completed(shapes.as_dims(y.shape), shapes.as_dims(shape)))
    infer_shapes(model)


def _completed(found: Shape, recorded: Shape) -> Shape:
    """Return ``found``, completed by ``recorded`` unless they contradict."""
    contradicts = len(found) != len(recorded) or shapes.clash(found, recorded)
    return found if contradicts else tuple(map(better, found, recorded))

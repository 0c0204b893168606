"""Pass: If with a known condition becomes the branch that it takes."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph import shapes
from gradgraph.builder import Var
from gradgraph.normal.edit import Editor, nodes_of


def take_known_branches(model: ir.Model) -> bool:
    """Replace each If whose condition is constant; True if there was one.

    1. the branch's nodes move before the If, in their order; their names are unique in the model already;
    2. an If within a branch that was taken is looked at in turn; the other branch is dropped.
    """
    editor = Editor(model)
    waiting = [n for n in nodes_of(model) if n.op_type == "If" and n.domain == ""]
    changed = False
    while waiting:
        node = waiting.pop()
        condition = shapes.constant_of(node.inputs[0])
        if condition is None or node.graph is None:
            continue
        _take(editor, node, node.attributes["then_branch" if condition.item() else "else_branch"].as_graph())
        changed = True
    return changed


def _take(editor: Editor, node: ir.Node, branch: ir.Graph) -> None:
    results = list(branch.outputs)
    moved = list(branch)
    branch.outputs.clear()
    branch.remove(moved)
    editor.op.nodes.extend(moved)
    editor.replace(node, *[Var(editor.op, v) for v in results])

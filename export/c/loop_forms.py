"""Rewrite Loops with a constant number of steps as Scans, whose results have known sizes.

The states that a Loop collects in a sequence, as the gradient of a Loop does, become a scan output:

    Loop(trips, true, s, SequenceEmpty()) { t = f(s); list = SequenceInsert(list, s) }, SequenceAt(list, i)
    Scan(s, arange(trips)) { t = f(s) } → stacked s, Gather(stacked s, i)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.nodes import input_at, is_standard, made_by, source_of
from gradgraph.graph.shapes import all_sizes
from gradgraph.passes.normal.edit import Editor, calls_of, emptied


def write_scans(model: ir.Model) -> bool:
    """Rewrite all Loops of ``model`` that have a constant number of steps, in place; return whether there were any."""
    editor = Editor(model)
    changed = False
    for node in calls_of(model, "Loop"):
        steps = _steps(node)
        lists = None if steps is None else _lists(node)
        if steps is not None and lists is not None:
            _write(editor, node, steps, lists)
            changed = True
    return changed


@dataclass
class _List:
    """A state that collects a value of each step: the state's index, the value, and the readers of the sequence."""

    state: int
    value: ir.Value
    readers: list[ir.Node]


def _steps(node: ir.Node) -> int | None:
    """Return the number of steps of a Loop, or None if it is unknown or the Loop may end early."""
    limit, condition = _constant(input_at(node, 0)), input_at(node, 1)
    if limit is None or not (condition is None or _is_true(condition)):
        return None
    body = node.attributes["body"].as_graph()
    leaving = _source(body.outputs[0])
    if leaving is not body.inputs[1] and not _is_true(leaving):
        return None
    sizes = [
        (outer.shape, inner.shape)
        for outer, inner in zip(node.inputs[2:], body.outputs[1:], strict=False)
        if outer is not None and outer.shape is not None and inner.shape is not None
    ]
    if any(len(a) != len(b) for a, b in sizes):
        return None  # a state changes its shape
    return max(int(limit.ravel()[0]), 0)


def _source(value: ir.Value) -> ir.Value:
    """Return the value of which ``value`` is a copy."""
    while (source := source_of(value, "Identity")) is not None:
        value = source
    return value


def _constant(value: ir.Value | None) -> np.ndarray | None:
    if value is None:
        return None
    source = _source(value)
    node = made_by(source, "Constant")
    if node is not None and "value" in node.attributes:
        return np.asarray(node.attributes["value"].as_tensor().numpy())
    return None if source.const_value is None else source.const_value.numpy()


def _is_true(value: ir.Value) -> bool:
    found = _constant(value)
    return found is not None and bool(found.all())


def _lists(node: ir.Node) -> list[_List] | None:
    """Return the sequences that are states; None if one is used otherwise than the gradient of a Loop does."""
    body = node.attributes["body"].as_graph()
    found = []
    for k, outer in enumerate(node.inputs[2:]):
        if outer is None:
            return None
        maker = _source(outer).producer()
        if maker is None or not is_standard(maker, "SequenceEmpty"):
            if isinstance(outer.type, ir.SequenceType | ir.OptionalType):
                return None
            continue
        insert = _source(body.outputs[1 + k]).producer()
        entering = body.inputs[2 + k]
        if insert is None or not is_standard(insert, "SequenceInsert") or insert.inputs[0] is not entering:
            return None
        readers = [use.node for use in node.outputs[k].uses()]
        value = insert.inputs[1]
        only = len(entering.uses()) == 1 and input_at(insert, 2) is None and not node.outputs[k].is_graph_output()
        if value is None or not only or not all(is_standard(r, "SequenceAt") for r in readers):
            return None
        found.append(_List(k, value, readers))
    return found


def _write(editor: Editor, node: ir.Node, steps: int, lists: Sequence[_List]) -> None:
    op = editor.op
    op.scope = node.name or ""
    body = node.attributes.pop("body").as_graph()
    states = len(node.inputs) - 2
    gone = {entry.state for entry in lists}
    kept = [k for k in range(states) if k not in gone]
    number, go_on, *entering = list(body.inputs)
    leaving = list(body.outputs)[1:]
    initializers = list(body.initializers.values())
    nodes = emptied(body)
    body.inputs.clear()
    body.initializers.clear()
    true = op.const(True).value
    go_on.replace_all_uses_with(true, replace_graph_outputs=True)
    values = [*(leaving[k] for k in kept), *leaving[states:], *(entry.value for entry in lists)]
    results, outside, op.nodes = list[ir.Value](), op.nodes, nodes
    for value in (true if v is go_on else v for v in values):
        own = value.producer() in nodes and value not in results
        results.append(value if own else _copied(op, value))
    nodes, op.nodes = op.nodes, outside
    inputs = [*(entering[k] for k in kept), number]
    graph = ir.Graph(inputs, results, nodes=nodes, initializers=initializers, name=body.name)
    numbers = np.arange(steps).reshape(
        (steps, *(all_sizes(number.shape) or ()))
    )  # a vector in legacy exports of PyTorch
    first = [op.wrap(node.inputs[2 + k]) for k in kept]
    made = all_of(op.Scan(*first, op.const(numbers), outputs=len(results), body=graph, num_scan_inputs=1))
    for new, result in zip(made, results, strict=True):
        new.value.type = result.type
    editor.place(node)
    for entry, stacked in zip(lists, made[len(made) - len(lists) :], strict=True):
        for reader in entry.readers:
            editor.replace(reader, op.Gather(stacked, op.wrap(reader.inputs[1]), axis=0))
    outputs: list[Var | None] = [None] * len(node.outputs)
    for k, new in zip([*kept, *range(states, len(node.outputs))], made, strict=False):
        outputs[k] = new
    scan = made[0].value.producer()
    assert scan is not None
    scan.name = node.name  # for messages
    editor.replace(node, *outputs)


def _copied(op: Builder, value: ir.Value) -> ir.Value:
    copy = op.Identity(op.wrap(value)).value
    copy.type, copy.shape = value.type, value.shape
    return copy

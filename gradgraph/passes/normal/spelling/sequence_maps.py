"""Pass: replace SequenceMap with an equivalent Loop."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph.builder import Var, all_of
from gradgraph.passes.normal.edit import Editor, calls_of, emptied

_SCALARS = {"place": ir.DataType.INT64, "go": ir.DataType.BOOL}


def write_maps(model: ir.Model) -> bool:
    """Replace every SequenceMap with a Loop; return True if there was one.

    The states of the Loop are the result sequences so far. Iteration ``place`` reads element ``place`` of each input
    sequence; other inputs are read from outside. ONNX's own function body is not used, because it does not support
    bodies that read outer values.
    """
    editor = Editor(model)
    found = calls_of(model, "SequenceMap")
    for node in found:
        editor.replace(node, *_loop(editor, node))
    return bool(found)


def _loop(editor: Editor, node: ir.Node) -> list[Var]:
    op, body = editor.op, node.attributes["body"].as_graph()
    results = [ir.SequenceType(ir.TensorType(op.wrap(y).dtype)) for y in body.outputs]
    first = node.inputs[0]
    assert first is not None

    def write(place: Var, go: Var, *made: Var) -> list[Var]:
        for x, source in zip(body.inputs, node.inputs, strict=True):
            assert source is not None
            x.replace_all_uses_with(_element(op.wrap(source), place, x).value, replace_graph_outputs=True)
        outputs = list(body.outputs)
        op.nodes.extend(emptied(body))
        longer = [op.SequenceInsert(s, op.wrap(y)) for s, y in zip(made, outputs, strict=True)]
        return [go, *(_typed(s, kind) for s, kind in zip(longer, results, strict=True))]

    states = [_typed(op.SequenceEmpty(dtype=int(t.dtype)), t) for t in results]
    inputs = [ir.Value(name=n, type=ir.TensorType(t), shape=ir.Shape([])) for n, t in _SCALARS.items()]
    inputs += [ir.Value(name="made", type=t, shape=y.shape) for t, y in zip(results, body.outputs, strict=True)]
    graph = op.graph(inputs, write, "map")
    return all_of(op.Loop(op.SequenceLength(op.wrap(first)), True, *states, body=graph, outputs=len(states)))


def _typed(x: Var, kind: ir.TypeProtocol) -> Var:
    x.value.type = kind
    return x


def _element(source: Var, place: Var, x: ir.Value) -> Var:
    """Return the value to read as ``x`` in the body: an element of ``source`` if it is a sequence, else ``source``."""
    if not isinstance(source.value.type, ir.SequenceType):
        return source
    element = source.op.SequenceAt(source, place)
    element.value.type, element.value.shape = ir.TensorType(source.dtype), x.shape
    return element

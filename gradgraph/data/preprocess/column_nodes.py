"""Preprocessing inside a model: input nodes that read table columns, and output nodes that return class names.

Node names begin with ``preprocess/``, by which :func:`cut_off` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from gradgraph.data.preprocess.column_parts import ML
from gradgraph.data.preprocess.plan import Plan
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.prune import prune

SCOPE = "preprocess"
ML_OPSET = 4  # the first opset in which LabelEncoder accepts 64-bit numbers
CLASS, PROBABILITIES = "class", "probabilities"


def alone(plan: Plan) -> onnx.ModelProto:
    """Return a model with the preprocessing nodes only, which converts columns to arrays."""
    graph = ir.Graph([], [], nodes=[], name=SCOPE, opset_imports={"": 21})
    graph.outputs.extend(_written(plan, graph, "rows", None).values())
    return ir.serde.serialize_model(ir.Model(graph, ir_version=10))


def put_before(model: ir.Model, plan: Plan) -> None:
    """Prepend the preprocessing nodes to ``model``, whose inputs are then table columns, each [rows]."""
    graph = model.graph
    _make_room(graph, plan)
    inputs = {value.name: value for value in graph.inputs}
    shape = next(inputs[name].shape for name in plan.features if name in inputs)
    rows = "rows" if shape is None else shape[0]
    made = _written(plan, graph, rows, graph[0] if len(graph) else None)
    for name, value in made.items():
        if name in inputs:
            ir.convenience.replace_all_uses_with(inputs[name], value)
            graph.inputs.remove(inputs[name])


def call_classes(model: ir.Model, scores: Mapping[str, tuple[Sequence[str], str]]) -> None:
    """Add the outputs ``class``, text [rows], and ``probabilities``, [rows, classes], in the dtype of the scores.

    Args:
        model: the model, changed in place. Its scores are [rows, classes], or for a binary classifier only those for
            the second class, [rows] or [rows, 1].
        scores: for each output of class scores, the class names and the operator that converts scores to
            probabilities ("Identity" if they are probabilities already). With several such outputs, the new ones are
            named ``<output>.class`` and so on.
    """
    graph = model.graph
    op = Builder(_names(graph), scope=SCOPE)
    graph.opset_imports[ML] = max(ML_OPSET, graph.opset_imports.get(ML, 0))
    for name, (classes, computed) in scores.items():
        value = next(v for v in graph.outputs if v.name == name)
        shape = () if value.shape is None else tuple(value.shape)
        of = f"{name}." if len(scores) > 1 else ""
        single = shape[1:] != (len(classes),)
        best = _second(op, value, computed) if single else op.ArgMax(Var(op, value), axis=1, keepdims=0)
        called = op.emit("LabelEncoder", best, domain=ML, keys_int64s=list(range(len(classes))),
                         values_strings=list(classes), default_string="")  # fmt: skip
        _give(op, graph, called, f"{of}{CLASS}", ir.DataType.STRING, ir.Shape(shape[:1]))
        if computed:
            made = _of_both(op, value, computed) if single else _computed(op, Var(op, value), computed)
            _give(op, graph, made, f"{of}{PROBABILITIES}", value.dtype, ir.Shape([*shape[:1], len(classes)]))
    op.finish(graph)


def _computed(op: Builder, x: Var, computed: str) -> Var:
    return op.Softmax(x, axis=1) if computed == "Softmax" else op.emit(computed, x)


def _second(op: Builder, value: ir.Value, computed: str) -> Var:
    """Emit nodes that compute the class, 0 or 1, from a binary classifier's score of the second class: int64 [rows]."""
    middle = op.const(0.5 if computed == "Identity" else 0.0, value.dtype)
    return op.Reshape(op.Cast(op.Greater(Var(op, value), middle), to=ir.DataType.INT64), [-1])


def _of_both(op: Builder, value: ir.Value, computed: str) -> Var:
    """Emit nodes that compute the probabilities of both classes, [rows, 2], from the score of the second."""
    yes = op.Reshape(_computed(op, Var(op, value), computed), [-1, 1])
    return op.Concat(op.const(1.0, value.dtype) - yes, yes, axis=1)


def cut_off(model: ir.Model, plan: Plan) -> None:
    """Undo :func:`put_before` and :func:`call_classes`, restoring the original inputs and outputs."""
    graph = model.graph
    if not plan.stands_before({v.name or "": -1 if v.shape is None else len(v.shape) for v in graph.inputs}):
        return
    outputs = [v for v in graph.outputs if not _is_ours(v)]
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    made = {node.name: node.outputs[0] for node in graph}
    kept = [v for v in graph.inputs if v.name not in plan.read]
    graph.inputs.clear()
    for name, own in plan.features.items():
        value = made.get(f"{SCOPE}/{name}")
        if value is not None:
            dtype = ir.DataType.INT64 if name == plan.indices else ir.DataType.FLOAT
            given = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(["batch", len(own)]))
            ir.convenience.replace_all_uses_with(value, given)
            graph.inputs.append(given)
    graph.inputs.extend(kept)
    prune(model)


def _written(
    plan: Plan, graph: ir.Graph, rows: ir.SymbolicDim | int | str, before: ir.Node | None
) -> dict[str, ir.Value]:
    """Add the columns as inputs of ``graph``, and the nodes that compute the arrays; return the arrays by name."""
    ends = {name: f"{SCOPE}/{name}" for name in plan.features}
    op = Builder([*_names(graph), *plan.read, *ends.values()], scope=SCOPE)
    made: dict[str, list[Var]] = {}
    for name, kind in plan.read.items():
        dtype = ir.DataType.STRING if kind.takes_text else ir.DataType.DOUBLE
        column = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([rows]))
        graph.inputs.append(column)
        of = plan.indices if kind.is_index else plan.numbers
        made.setdefault(of, []).append(kind.write(op, Var(op, column)))
    whole = {name: op.Concat(*made[name], axis=1).value for name in plan.features}
    for name, own in plan.features.items():
        whole[name].shape = ir.Shape([rows, len(own)])
        if (node := whole[name].producer()) is not None:
            node.name = ends[name]  # cut_off finds the node by this name
    graph.opset_imports[ML] = max(ML_OPSET, graph.opset_imports.get(ML, 0))
    # constants that were folded into other constants have no uses
    op.constants = [value for value in op.constants if value.uses()]
    op.finish(graph, before)
    return whole


def _make_room(graph: ir.Graph, plan: Plan) -> None:
    """Rename values of the model with the name of a column, except inputs that the preprocessing replaces."""
    op = Builder([*_names(graph), *plan.read])
    going = {value for value in graph.inputs if value.name in plan.features}
    values = [*graph.inputs, *graph.initializers.values(), *(v for node in graph.all_nodes() for v in node.outputs)]
    for value in values:
        if value.name in plan.read and value not in going:
            value.name = op.fresh(value.name or "")


def _give(op: Builder, graph: ir.Graph, made: Var, name: str, dtype: ir.DataType | None, shape: ir.Shape) -> None:
    made.value.name = op.fresh(name)
    made.value.type = None if dtype is None else ir.TensorType(dtype)
    made.value.shape = shape
    graph.outputs.append(made.value)


def _is_ours(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and (node.name or "").startswith(f"{SCOPE}/")


def _names(graph: ir.Graph) -> list[str]:
    nodes = [v.name or "" for node in graph.all_nodes() for v in node.outputs]
    return [*nodes, *(v.name or "" for v in graph.inputs), *graph.initializers]

"""Graphs that differ from a composite's case in one place: if the composite is still recognised, it must be right.

In each graph, one node has another operator, reads another value, or has its inputs swapped, or a constant or attribute
is changed. If the composite is still recognised, the gradient by its rule must equal that by the rules of its parts.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator
from unittest.mock import patch

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import gradgraph as gg
from gradgraph.autodiff.select import find_path
from gradgraph.errors import GradgraphError
from gradgraph.passes.normal import normalise
from gradgraph.rules.composites.table import calls
from gradgraph.rules.registry import Case, Rule
from gradgraph.verify.cases import Trial, trial

OTHERS = {"PickedLogProbability": 6}  # the number of last cases that only resemble the composite and are not recognised
ALIKE = (  # groups of operators that accept the same inputs
    {"Mul", "Div", "Add", "Sub", "Pow", "MatMul", "Max"},
    {"Erf", "Tanh", "Sigmoid", "Sqrt", "Reciprocal", "Exp", "Neg"},
    {"Softmax", "LogSoftmax"},
    {"ReduceMean", "ReduceSum", "ReduceMax"},
)
TOLERANCE = 1e-9
LARGEST = 1e9  # larger gradients, as with a scale of 1e30, are dominated by rounding and not compared


def found(model: onnx.ModelProto, wrt: Collection[str]) -> Counter[str]:
    """Return how often each composite is recognised."""
    work = normalise(model, parameters=list(wrt))
    values = {v.name: v for v in (*work.graph.inputs, *work.graph.initializers.values())}
    values |= {y.name: y for node in work.graph for y in node.outputs}
    outputs = [y for y in work.graph.outputs if y.dtype is not None and y.dtype.is_floating_point()]
    path = find_path(work, outputs, [values[x] for x in wrt], True)
    named = calls(path.nodes, path.active, set(path.wrt)).values()
    return Counter(call.composite.rule.op_type for call in named)


def is_missed(rule: Rule, case: Case) -> bool:
    """Whether the composite is not recognised in one of its own cases."""
    t = trial(rule, case)
    is_one = rule.cases.index(case) < len(rule.cases) - OTHERS.get(rule.op_type, 0)
    return found(t.model, t.wrt)[rule.op_type] != is_one


def disagreements(rule: Rule, case: Case) -> list[str]:
    """Return one sentence for each wrong gradient of a graph that differs from ``case`` and has the composite."""
    t = trial(rule, case)
    return [said for what, model in edits(t.model) if (said := _disagreement(rule.op_type, what, model, t))]


def _disagreement(name: str, what: str, model: onnx.ModelProto, t: Trial) -> str:
    with np.errstate(all="ignore"), contextlib.suppress(GradgraphError):  # some graphs are not valid models
        if not found(model, t.wrt)[name]:
            return ""
        try:
            outputs = ReferenceEvaluator(model).run(None, t.feeds)
        except Exception:  # any error of NumPy about sizes that do not match
            return ""
        feeds = dict(t.feeds)
        for y, value in zip(model.graph.output, outputs, strict=True):
            feeds[f"{y.name}.cotangent"] = np.cos(np.arange(value.size, dtype=value.dtype)).reshape(value.shape)
        by_rule = _gradients(model, t, feeds)
        with (
            patch("gradgraph.autodiff.reverse.calls", lambda *_: {}),
            patch("gradgraph.autodiff.forward.calls", lambda *_: {}),
        ):
            by_parts = _gradients(model, t, feeds)
        scale, largest = (max(np.abs(g[np.isfinite(g)]).max(initial=0) for g in gs) for gs in (by_parts, by_rule))
        if max(scale, largest) > LARGEST:
            return ""
        for x, a, b in zip(t.wrt, by_rule, by_parts, strict=True):
            if a.shape != b.shape or not np.allclose(a, b, 0, TOLERANCE * (scale or 1.0), equal_nan=True):
                return f"{what}: the gradient of {x} is not that of the parts"
    return ""


def _gradients(model: onnx.ModelProto, t: Trial, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    gradient = gg.vjp(model, wrt=t.wrt, allow_unused=True)
    read = {v.name for v in gradient.graph.input}
    names = [f"{x}.grad" for x in t.wrt]
    results: list[np.ndarray] = ReferenceEvaluator(gradient).run(names, {k: v for k, v in feeds.items() if k in read})
    return results


def edits(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield descriptions of single changes, each with the changed graph, whose output shapes are unknown."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.value_info[:]
    for y in bare.graph.output:
        y.type.tensor_type.ClearField("shape")
    known = [v.name for v in (*bare.graph.input, *bare.graph.initializer)]
    for i, node in enumerate(bare.graph.node):
        for what, new in _edits_of(node, known):
            changed = onnx.ModelProto()
            changed.CopyFrom(bare)
            changed.graph.node[i].CopyFrom(new)
            yield f"{what} at node {i}, {node.op_type}", changed
        known += node.output


def _edits_of(node: onnx.NodeProto, known: list[str]) -> Iterator[tuple[str, onnx.NodeProto]]:
    def copy() -> onnx.NodeProto:
        new = onnx.NodeProto()
        new.CopyFrom(node)
        return new

    for other in sorted({o for group in ALIKE if node.op_type in group for o in group} - {node.op_type}):
        new = copy()
        new.op_type = other
        yield f"{other} for it", new
    for j, x in enumerate(node.input):
        for value in known:
            if value != x:
                new = copy()
                new.input[j] = value
                yield f"{value} for {x}", new
    if len(node.input) > 1:
        new = copy()
        new.input[0], new.input[1] = node.input[1], node.input[0]
        yield "inputs swapped", new
    for k, attribute in enumerate(node.attribute):
        for value in _others(attribute):
            new = copy()
            new.attribute[k].CopyFrom(helper.make_attribute(attribute.name, value, attr_type=attribute.type))
            yield f"{attribute.name} = {value if isinstance(value, int | list) else '…'}", new


def _others(attribute: onnx.AttributeProto) -> Iterator[int | list[int] | onnx.TensorProto]:
    if attribute.type == onnx.AttributeProto.INT:
        yield from (attribute.i + 1, attribute.i - 1)
    elif attribute.type == onnx.AttributeProto.INTS:
        yield from ([i + 1 for i in attribute.ints], [i - 1 for i in attribute.ints], [*attribute.ints, -2], [])
    elif attribute.type == onnx.AttributeProto.TENSOR:
        number = numpy_helper.to_array(attribute.t)
        others = [2 * number, -number, number + 1, 1.001 * number, np.reshape(number, (1, 1, 1, 1))]
        for other in (*others, *([1 / number] if number.all() else [])):
            yield numpy_helper.from_array(np.asarray(other, number.dtype))

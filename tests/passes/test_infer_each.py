"""Sizes node by node: what ONNX's inference of the whole graph says, and nothing is said of what only that can tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph.backends import engine
from gradgraph.graph.shapes import as_dims, shape_of
from gradgraph.passes.normal.sizes.infer_each import infer_each
from tests.kit.lowered_networks import exported

NUMBERS = {"two": [0], "rows": [6, -1], "columns": [-1, 4], "thirds": [3, 1], "halves": [2, 2]}
# nodes that differ in one thing: attributes, numbers of inputs, types or shapes of inputs; the last is like the second
NODES = """
    a = Transpose <perm = [0, 1]> (x)
    b = Transpose <perm = [1, 0]> (x)
    c = Reshape (x, rows)
    d = Reshape (x, columns)
    e = Reshape (again, columns)
    h = MatMul (x, y)
    i = MatMul (x, z)
    j = MatMul (whole, whole_too)
    k = Concat <axis = 0> (x, x)
    l = Concat <axis = 1> (x, x)
    m = Concat <axis = 1> (x, x, x)
    n, o = Split <axis = 1> (x, thirds)
    p, q = Split <axis = 1> (x, halves)
    r, s = TopK (x, one)
    t, r2 = TopK <axis = 0> (x, one)
    u = ReduceSum (x, two)
    v = ReduceSum <keepdims = 0> (x, two)
    aa = Transpose <perm = [1, 0]> (x)
"""


def model_of(nodes: str, **numbers: Any) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[3, 4] x, float[2, 6] again, float[4, 5] y, float[4, 7] z, int64[3, 4] whole, int64[4, 5] whole_too,
           float[1, 1, 5, 5] image, float[2] sizes, bool yes) => () {{ {nodes} }}""")
    for name, array in numbers.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(array), name))
    return model


def test_nodes_that_differ_in_one_thing_are_not_taken_for_alike() -> None:
    proto = model_of(NODES, **NUMBERS, one=[1])
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph.value_info
    expected = {v.name: onnx.helper.printable_type(v.type) for v in inferred}
    assert len(expected) == 22
    graph = ir.from_proto(proto).graph
    for _ in range(2):  # the second time from what is remembered
        for value in (v for node in graph for v in node.outputs if v.name):
            value.shape = value.type = None
            value.meta.clear()
        for node in graph:
            for value in node.outputs:
                if value.name:
                    shape_of(value)
                    found = onnx.helper.printable_type(ir.to_proto(value).type)
                    assert (value.name, found) == (value.name, expected[value.name])


@pytest.mark.parametrize("network", ["residual", "mlp", "transformer", "lstm"])
def test_a_step_is_opened_as_by_inference_of_the_whole(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (model,) = gg.build(exported(network, "batch"), "cross_entropy", "adamw").trains.values()
    answers = []
    monkeypatch.setattr(engine, "infer_each", lambda m: answers.append(infer_each(m)) or answers[-1])
    found = ir.to_proto(engine.opened(model, {"batch": 3})).SerializeToString(deterministic=True)
    monkeypatch.setattr(engine, "infer_each", lambda m: False)
    expected = ir.to_proto(engine.opened(model, {"batch": 3})).SerializeToString(deterministic=True)
    assert found == expected and any(answers) == (network != "transformer")  # which has sizes such as 11*batch


@pytest.mark.parametrize(
    ("nodes", "whole"),
    [
        ("a = MaxPool <kernel_shape = [2, 2]> (image)", False),
        ("a = MaxPool <kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1> (image)", True),
        ("a = Resize (image, , scales)", True),
        ("s = Shape (x) t = Mul (s, s) a = Reshape (x, t)", True),
        ("a = If (yes) <then_branch = t () => (float[1] p) { p = Neg (one) },"
         " else_branch = e () => (float[1] q) { q = Abs (one) }>", True),
    ],
)  # fmt: skip
def test_what_only_the_whole_graph_tells_is_left_to_it(nodes: str, whole: bool) -> None:
    scales = np.array([1, 1, 2, 2], np.float32)
    model = ir.from_proto(model_of(nodes, scales=scales, one=np.ones(1, np.float32)))
    assert infer_each(model) is not whole


def test_what_is_recorded_stays_where_a_node_tells_less() -> None:
    model = ir.from_proto(model_of("s = Shape (x) t = Mul (s, s) a = Reshape (x, t)"))
    a = model.graph[2].outputs[0]
    a.shape = ir.Shape(["batch", 4])
    assert not infer_each(model)
    assert a.shape is not None and as_dims(a.shape) == ("batch", 4)

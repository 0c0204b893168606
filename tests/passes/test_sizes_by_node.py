"""Sizes node by node are those that ONNX's inference of the whole graph says."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir

from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.sizes.infer import infer_shapes

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
    for _ in range(2):
        for value in (v for node in graph for v in node.outputs if v.name):
            value.shape = value.type = None
            value.meta.clear()
        for node in graph:
            for value in node.outputs:
                if value.name:
                    shape_of(value)
                    found = onnx.helper.printable_type(ir.to_proto(value).type)
                    assert (value.name, found) == (value.name, expected[value.name])


def test_absent_outputs_have_no_sizes() -> None:
    """They share one name, so sizes that were copied by name would be those of another output."""
    model = ir.from_proto(
        onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[5, 6, 3] x, float[1, 8, 3] w, float[1, 8, 2] r) => (cell) {
            "", "", cell = LSTM <hidden_size = 2> (x, w, r)
        }""")
    )
    infer_shapes(model)
    first, last, cell = model.graph[0].outputs
    assert cell.shape == (1, 6, 2) and first.type is last.type is None
    assert not any(isinstance(d, int) for absent in (first, last) for d in absent.shape or ())

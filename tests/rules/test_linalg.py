"""Einsum equations, and what the backward pass of products looks like."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import onnx
import pytest

import gradgraph as gg
from gradgraph.errors import ModelError
from gradgraph.rules.linalg import subscripts

EQUATIONS = [
    ("ij,jk->ik", [2, 2], ["ij", "jk"], "ik"),
    (" b a ", [2], ["ba"], "ab"),
    ("ii", [2], ["ii"], ""),
    ("kj,jB", [2, 2], ["kj", "jB"], "Bk"),
    ("...i,i", [3, 1], ["abi", "i"], "ab"),
    ("...ij,...jk->...ik", [4, 3], ["abij", "bjk"], "abik"),
    ("...->...", [0], [""], ""),
    ("a...->...", [2], ["ab"], "b"),
    (",i->i", [0, 1], ["", "i"], "i"),
]


@pytest.mark.parametrize(("equation", "ranks", "terms", "out"), EQUATIONS)
def test_every_axis_gets_a_label(equation: str, ranks: list[int], terms: list[str], out: str) -> None:
    assert subscripts(equation, ranks) == (terms, out)


def test_more_axes_than_letters_are_refused() -> None:
    with pytest.raises(ModelError, match="more than 52 labels"):
        subscripts("...->...", [53])


PLAIN = [
    ("MatMul", [[8, 3], [3, 4]], {}, {"Gemm": 2}),
    ("MatMul", [["N", "T", 3], [3, 4]], {}, {"Transpose": 1, "MatMul": 1, "Flatten": 2, "Gemm": 1}),
    ("MatMul", [["N", 4, "T", 3], ["N", 4, 3, "T"]], {}, {"Transpose": 2, "MatMul": 2}),
    ("Gemm", [["N", 3], [3, 4], [4]], {}, {"Gemm": 2, "ReduceSum": 1}),
    ("Einsum", [["N", 4, "T", 8], ["N", 4, "T", 8]], {"equation": "bhqd,bhkd->bhqk"}, {"Einsum": 2}),
]


@pytest.mark.parametrize(("op_type", "shapes", "attributes", "expected"), PLAIN)
def test_plain_cases_take_few_nodes(
    op_type: str, shapes: list[Any], attributes: dict[str, Any], expected: dict[str, int]
) -> None:
    names = [f"x{i}" for i in range(len(shapes))]
    inputs = [
        onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in zip(names, shapes, strict=True)
    ]
    node = onnx.helper.make_node(op_type, names, ["y"], **attributes)
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = onnx.helper.make_graph([node], "g", inputs, [output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    gradient = gg.vjp(model, wrt=names)
    compares = re.compile("sizes/|.*/is_as_long_as/")  # sizes that inputs share
    nodes = [n.op_type for n in gradient.graph.node if not compares.match(n.name)]
    assert Counter(nodes) - Counter([op_type]) == Counter(expected)

"""gradgraph/graph/typed_operators.pyi says what ONNX's schemas say, and what ``Builder.emit`` does."""

from __future__ import annotations

import ast

import numpy as np
import pytest

from gradgraph.graph.builder import Builder, Var
from tests.pages.operator_stubs import STUB, stub

OUTPUTS = {"Abs": 1, "TopK": 2, "Unique": 4, "Split": 3}


def test_the_stub_is_made_from_the_schemas() -> None:
    assert STUB.read_text("utf-8") == stub(), "run `python -m tests.pages.operator_stubs`"


def test_the_stub_is_python() -> None:
    (calls,) = (n for n in ast.parse(stub()).body if isinstance(n, ast.ClassDef))
    methods = {n.name for n in calls.body if isinstance(n, ast.FunctionDef)}
    assert {"Conv", "If", "LSTM", "Gelu", "Col2Im"} <= methods
    assert not {n for n in methods if n in vars(Builder)}, "a word of Builder hides an operator"


@pytest.mark.parametrize("op_type", OUTPUTS)
def test_a_node_gives_what_the_stub_says(op_type: str) -> None:
    count, op = OUTPUTS[op_type], Builder()
    inputs = {"TopK": [[3]], "Split": [[1, 1, 1]]}.get(op_type, [])
    found = getattr(op, op_type)(op.weight("x", np.zeros(3, np.float32)), *inputs, outputs=count)
    results = (found,) if count == 1 else found
    assert isinstance(results, tuple) and len(results) == count and all(isinstance(y, Var) for y in results)
    says = "Var" if count == 1 else f"tuple[{', '.join(['Var'] * count)}]"
    assert any(
        line.startswith(f"    def {op_type}(") and line.endswith(f" -> {says}: ...") for line in stub().splitlines()
    )

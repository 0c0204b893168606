"""What a node's output is known to have at the top of a model, it is known to have in a branch, too."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import gradgraph.rules.families  # noqa: F401  (fills the registry)
from gradgraph.graph import shapes
from gradgraph.graph.checks import subgraphs
from gradgraph.graph.size_context import is_generated
from gradgraph.passes.normal import normalise
from gradgraph.rules.composites.table import rules_with_cases
from gradgraph.rules.registry import Rule
from gradgraph.verify import cases

RULES = [pytest.param(r, id=r.op_type) for r in rules_with_cases() if r.domain == "" and r.cases]


def in_branches(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same nodes in both branches of an If; the initializers stay outside."""
    branches = {}
    for name in ("then_branch", "else_branch"):
        outputs = [onnx.ValueInfoProto(name=y.name) for y in model.graph.output]
        branches[name] = helper.make_graph(model.graph.node, name, [], outputs)
        for value in branches[name].output:
            value.type.tensor_type.elem_type = value_type(model, value.name)
    ends = [onnx.ValueInfoProto(name=f"{y.name}.chosen", type=y.type) for y in model.graph.output]
    chosen = helper.make_node("If", ["condition"], [y.name for y in ends], "choice", **branches)
    inputs = [*model.graph.input, helper.make_tensor_value_info("condition", TensorProto.BOOL, [])]
    graph = helper.make_graph([chosen], "g", inputs, ends, model.graph.initializer)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def value_type(model: onnx.ModelProto, name: str) -> int:
    return next(y.type.tensor_type.elem_type for y in model.graph.output if y.name == name)


def known(values: list[ir.Value]) -> list[tuple[shapes.Dim, ...] | None]:
    """Their shapes, without names that an inference made up."""
    found = map(shapes.recorded_shape, values)
    return [None if s is None else tuple(None if is_generated(d) else d for d in s) for s in found]


@pytest.mark.sweep(0.093)
@pytest.mark.parametrize("rule", RULES)
def test_as_much_is_known_in_a_branch_as_at_the_top(rule: Rule) -> None:
    for case in rule.cases:
        model = cases.trial(rule, case, unknown="even", dtype=np.float32).model
        (chosen,) = [n for n in normalise(in_branches(model)).graph if n.name == "choice"]
        expected = known(list(normalise(model).graph.outputs))
        for branch in subgraphs(chosen):
            assert known(list(branch.outputs)) == expected, case

"""What the passes of onnx-ir get wrong, which is why ours exist; a test that fails here says that ours can go."""

from __future__ import annotations

from collections import Counter

import onnx
import onnx_ir as ir
import pytest
from onnx_ir.passes import common

from gradgraph.graph.prune import prune
from gradgraph.passes.normal.functions.inline import inline_functions
from gradgraph.passes.normal.spelling.constants import gather_constants
from gradgraph.passes.normal.spelling.defaults import write_defaults
from gradgraph.passes.normal.spelling.names import make_names_unique
from tests.passes.normal.test_cse import ROWS, kinds, model

HEADER = '<ir_version: 10, opset_import: ["": 21, "own": 1]> g (float[3] x, bool c) => (float[3] y) '
BRANCHES = """{ y = If(c) <
  then_branch = a () => (float[3] p) { q = Constant<value_floats=[1.0, 2.0, 3.0]>() p = Add(x, q) },
  else_branch = b () => (float[3] r) { q = Constant<value_floats=[1.0, 2.0, 3.0]>() r = Sub(x, q) }
> }"""
WRONGLY_MERGED = {"an attribute of 0.0 and one of -0.0", "what may drop out one day", "operators of another domain"}
NOT_MERGED = {"factors in the other order", "equal constants", "shapes of tensors of named sizes"}


def parsed(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(HEADER + text))


def names_in_bodies(of: ir.Model) -> list[str | None]:
    return [v.name for body in of.graph.subgraphs() for node in body for v in node.outputs]


def test_equal_nodes() -> None:
    different = set()
    for name, (body, left) in ROWS.items():
        found = model(body)
        common.CommonSubexpressionEliminationPass()(found)
        if kinds(prune(found)) != Counter(left.split()):
            different.add(name)
    assert different == WRONGLY_MERGED | NOT_MERGED


def test_equal_nodes_in_bodies() -> None:
    found = parsed("{ y = If(c) <then_branch = a () => (float[3] p) { q = Exp(x) r = Exp(x) p = Add(q, r) },"
                   "else_branch = b () => (float[3] s) { s = Identity(x) }> }")  # fmt: skip
    common.CommonSubexpressionEliminationPass()(found)
    assert [n.op_type for body in found.graph.subgraphs() for n in body].count("Exp") == 2


def test_functions_of_another_opset() -> None:
    text = '{ y = own.F(x) } <opset_import: ["": 13], domain: "own"> F (x) => (y) { y = Relu(x) }'
    with pytest.raises(ValueError, match="Opset mismatch"):
        common.InlinePass()(parsed(text))
    ours = parsed(text)
    inline_functions(ours)
    assert [(n.op_type, n.version) for n in ours.graph] == [("Relu", 13)]


def test_constants_of_bodies() -> None:
    theirs, ours = parsed(BRANCHES), parsed(BRANCHES)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(theirs)
    assert not theirs.graph.initializers
    make_names_unique(ours)
    gather_constants(ours)
    assert len(ours.graph.initializers) == 2


def test_names_in_two_branches() -> None:
    theirs, ours = parsed(BRANCHES), parsed(BRANCHES)
    common.NameFixPass()(theirs)
    assert len(set(names_in_bodies(theirs))) < len(names_in_bodies(theirs))
    make_names_unique(ours)
    assert len(set(names_in_bodies(ours))) == len(names_in_bodies(ours))


def test_defaults_that_depend_on_the_rank() -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[1,1,4,4] x, float[1,1,3,3] w) => (float[1,1,2,2] y)'
    theirs, ours = (ir.from_proto(onnx.parser.parse_model(text + "{ y = Conv(x, w) }")) for _ in range(2))
    common.AddDefaultAttributesPass()(theirs)
    assert set(theirs.graph[0].attributes) == {"auto_pad", "group"}
    write_defaults(ours.graph)
    assert set(ours.graph[0].attributes) == {"dilations", "group", "kernel_shape", "pads", "strides"}

"""Peepholes inside of Loop: bodies get shorter, and do no work that was done once outside."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import parser

from gradgraph.graph.prune import prune
from gradgraph.passes.normal import normalise
from gradgraph.passes.normal.simplifying.peepholes import simplify
from tests.kit.small_models import assert_same, run

STATE = np.random.default_rng(0).uniform(0.5, 2.0, (3, 3)).astype(np.float32)


def loop(before: str, inside: str) -> onnx.ModelProto:
    """``inside`` makes ``c`` of the state ``a`` and of what ``before`` computes of ``x``."""
    return parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[3, 3] x, float[3, 3] s, int64 k) => (float[3, 3] e) {{
            {before}
            e = Loop <body = b (int64 i, bool go, float[3, 3] a) => (bool on, float[3, 3] c) {{
                on = Identity(go)  {inside}
            }}> (k, , s)
        }}""")


def written(before: str, inside: str) -> list[list[str]]:
    """The operators of graph and body, simplified; they compute what they did."""
    model = loop(before, inside)
    found = prune(simplify(normalise(model)))
    feeds = {"x": STATE, "s": STATE + 1, "k": np.array(3)}
    assert_same(run(model, feeds), run(ir.to_proto(found), feeds), atol=1e-6)
    return [[node.op_type for node in graph] for graph in found.graphs()]


def test_bodies_are_simplified() -> None:
    graph, body = written("p = Sin(x)", "n = Neg(a)  d = Neg(n)  q = Identity(p)  c = Add(d, q)")
    assert graph == ["Sin", "Loop"]
    assert sorted(body) == ["Add", "Identity"]  # the condition, an output, keeps a node of its own


def test_a_product_that_is_made_once_stays_outside() -> None:
    assert written("p = Gemm(x, x)", "d = Add(a, p)  c = Sin(d)") == [["Gemm", "Loop"], ["Identity", "Add", "Sin"]]
    assert written("p = Gemm(x, x)", "t = Transpose<perm = [1, 0]>(p)  c = Mul(t, a)")[0] == ["Gemm", "Loop"]

"""What onnxruntime opens has derivatives that it opens: every operator, at the opsets at which it changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import gradgraph as gg
import gradgraph.rules.families
from gradgraph.backends.missing_kernels import FLOAT64
from gradgraph.errors import GradgraphError
from gradgraph.rules.composites.table import rules_with_cases
from gradgraph.rules.registry import Case, Rule
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle

CASES = [pytest.param(r, c, id=f"{r.op_type}-{i}") for r in rules_with_cases() for i, c in enumerate(r.cases)
         if not r.domain]  # fmt: skip
CHANGED: dict[str, set[int]] = {}
for _schema in onnx.defs.get_all_schemas_with_history():
    if _schema.domain == "":
        CHANGED.setdefault(_schema.name, set()).add(max(_schema.since_version, 7))


def opens(model: Any) -> str:
    """The reason why onnxruntime does not open ``model``; empty if it does."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of many kinds
        return str(error)
    return ""


@pytest.mark.sweep(0.002)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("rule", "case"), CASES)
def test_what_opens_has_a_gradient_that_opens(rule: Rule, case: Case, dtype: Any) -> None:
    try:
        t = cases.trial(rule, case, dtype=dtype)
    except TypeError:
        pytest.skip("the reference computes it in another type")
    newest = 26  # that this runtime knows
    for opset in sorted({13, 17, 21} | {v for v in CHANGED.get(rule.op_type, ()) if v <= newest}):
        model = onnx.ModelProto.FromString(t.model.SerializeToString())
        model.opset_import[0].version = opset
        if opens(model) or (rule.op_type == "GroupNormalization" and opset < 21):  # whose scale had other sizes
            continue
        for transform in (gg.vjp, gg.jvp):
            try:
                made = transform(model, outputs=t.read, wrt=t.wrt, allow_unused=True)
            except GradgraphError:
                continue
            assert opens(made) == "", (transform.__name__, opset)


@pytest.mark.parametrize("op_type", [name for name in FLOAT64 if name != "MaxUnpool"])
def test_what_is_written_instead_is_the_same_function(op_type: str) -> None:
    x = np.concatenate([[0.0, -0.0, 800.0, -800.0, 1.0, -1.0], np.linspace(-3, 3, 25)])
    node = helper.make_node(op_type, ["x", "s"] if op_type == "PRelu" else ["x"], ["y"])
    inputs = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, [31]) for n in node.input]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.DOUBLE, [31])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    made = gg.vjp(model, wrt="x")
    assert op_type not in {n.op_type for n in made.graph.node}
    feeds = {"x": x, "s": np.full(31, 0.3)}
    feeds = {n: feeds[n] for n in node.input}
    with np.errstate(over="ignore"):
        expected = Oracle(model)(feeds)["y"]
    found = ort.InferenceSession(made.SerializeToString()).run(None, {**feeds, "y.cotangent": np.ones(31)})
    finite = np.isfinite(expected)
    np.testing.assert_allclose(found[0][finite], expected[finite], rtol=1e-12, atol=1e-15)
    assert np.isfinite(found[0]).all() and np.isfinite(found[1]).all()
    second = ort.InferenceSession(gg.vjp(made, outputs="x.grad", wrt="x", allow_unused=True).SerializeToString())
    cotangents = {i.name: np.ones(31) for i in second.get_inputs() if "cotangent" in i.name}
    assert all(np.isfinite(value).all() for value in second.run(None, {**feeds, **cotangents}))


@pytest.mark.parametrize("backend", ["portable", "ort-cpu"])
@pytest.mark.parametrize(
    ("inputs", "product"),
    [
        ("float[2, n, 6] x, float[2, 6, 5] w", "MatMul (x, w)"),
        ("float[3, 2, n, 6] x, float[1, 6, 5] w", "MatMul (x, w)"),
        ("float[2, 6, n] x, float[2, 5, 6] w", "MatMul (w, x)"),
        ("float[2, n, 6] x, float[2, 6, 5] w", 'Einsum <equation = "bnk,bkm->bnm"> (x, w)'),
        ("float[n, 2, 6] x, float[2, 6, 5] w", 'Einsum <equation = "nbk,bkm->nbm"> (x, w)'),
    ],
)
def test_a_sum_without_terms_is_zero(inputs: str, product: str, backend: str) -> None:
    """A Transpose and a MatMul in onnxruntime leave their output unwritten if there are no terms to add."""
    body = f"y = {product} z = Mul (y, y) loss = ReduceSum <keepdims = 0> (z)"
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => (float loss) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    made = gg.value_and_grad(model, wrt="w", backend=backend)
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    shapes = {i.name: i.shape for i in session.get_inputs()}
    rng = np.random.default_rng(0)
    w = rng.normal(size=shapes["w"]).astype(np.float32)
    for _ in range(20):  # the memory that is not written must contain other numbers
        some, none = (rng.normal(size=[n if d == "n" else d for d in shapes["x"]]).astype(np.float32) for n in (40, 0))
        assert session.run(None, {"x": some, "w": w})[1].any()
        assert not session.run(None, {"x": none, "w": w})[1].any()

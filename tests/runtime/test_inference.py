"""The inference model: what stays, what goes, and that it computes the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx.parser
import pytest

from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.errors import ModelError
from gradgraph.step.inference import without_loss
from gradgraph.step.step import Manifest, StateSpec
from tests.kit.running import run

EVAL = """<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
eval (float[N, 2] x, float[N] t, bool flip, float[2] w, float[2] v, float[2] unread)
    => (float loss, float[N] y, float[N] z)
<float[1] used = {3}, float[1] spare = {4}> {
    p = MatMul (x, w)
    q = If (flip) <
        then_branch = yes () => (float[N] a) { inner = MatMul (x, v)  a = local.scaled (inner, used) },
        else_branch = no () => (float[N] b) { b = Identity (p) }
    >
    y = Add (p, q)
    z = Neg (y)
    d = Sub (y, t)
    far = local.unused (d, spare)
    s = Mul (far, far)
    loss = ReduceMean <keepdims = 0> (s)
}
<domain: "local", opset_import: ["" : 21]> twice (a) => (b) { b = Add (a, a) }
<domain: "local", opset_import: ["" : 21, "local" : 1]> scaled (a, k) => (b) { c = Mul (a, k)  b = local.twice (c) }
<domain: "local", opset_import: ["" : 21]> unused (a, k) => (b) { b = Mul (a, k) }
"""
VALUES = {"w": np.array([1, -2], np.float32), "v": np.array([0.5, 3], np.float32), "unread": np.ones(2, np.float32)}


def manifest(**changes: object) -> Manifest:
    base = Manifest(
        inputs=(TensorSpec("x", "float32", ("N", 2)), TensorSpec("flip", "bool", ())),
        targets=(TargetSpec("t", "float32", ("N",)),),
        outputs=("z", "y"),
        loss={"name": "mse", "arguments": {}},
        optimizer={"name": "sgd", "arguments": {}},
        state=tuple(StateSpec(name, "float32", (2,), f"{name}.next", "parameter") for name in VALUES),
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_keeps_what_the_outputs_need() -> None:
    source = onnx.parser.parse_model(EVAL)
    source.metadata_props.add(key="gradgraph", value="the manifest")
    source.metadata_props.add(key="author", value="somebody")
    before = source.SerializeToString()
    model = without_loss(source, manifest())
    onnx.checker.check_model(model, full_check=True)
    assert source.SerializeToString() == before
    assert [i.name for i in model.graph.input] == ["x", "flip", "w", "v"]
    assert [o.name for o in model.graph.output] == ["z", "y"]
    assert {t.name for t in model.graph.initializer} == {"used"}
    assert [n.op_type for n in model.graph.node] == ["MatMul", "If", "Add", "Neg"]
    assert {f.name for f in model.functions} == {"scaled", "twice"}
    assert [(p.key, p.value) for p in model.metadata_props] == [("author", "somebody")]


@pytest.mark.parametrize("flip", [True, False])
def test_computes_the_same(flip: bool) -> None:
    source = onnx.parser.parse_model(EVAL)
    batch = {"x": np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32), "flip": np.array(flip)}
    expected = run(source, {**batch, **VALUES, "t": np.zeros(5, np.float32)})
    found = run(without_loss(source, manifest()), {**batch, "w": VALUES["w"], "v": VALUES["v"]})
    assert np.array_equal(found["y"], expected["y"])
    assert np.array_equal(found["z"], expected["z"])


@pytest.mark.parametrize(
    ("outputs", "says"), [((), "the only output of the model"), (("y", "s"), "computed from the target 't'")]
)
def test_refuses(outputs: tuple[str, ...], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        without_loss(onnx.parser.parse_model(EVAL), manifest(outputs=outputs))

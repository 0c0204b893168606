"""Transforms written for a backend compute what the portable ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
import gradgraph.rules.families
from gradgraph.autodiff.tangents import PUSHES
from gradgraph.backends import BACKENDS
from gradgraph.backends.machine_requirements import BACKEND_KEY
from gradgraph.backends.ort_cpu.recurrent import shared_states as recurrent
from gradgraph.cli import choices
from gradgraph.errors import BuildError
from gradgraph.rules.registry import RULES, Case, Rule
from gradgraph.verify import cases
from tests.kit.lowered_networks import NETWORKS, batches, exported
from tests.kit.running import run

Transform = Callable[..., Any]
OTHERS = [t for t in BACKENDS if t not in ("portable", "ort-cpu-native")]  # tests/backends/ort_native has the last one


def scalar_of(name: str, rows: int | str) -> onnx.ModelProto:
    """The network, and the logarithm of the sum of squares of what it gives as its first output."""
    model = exported(name, rows)
    (y,) = model.graph.output
    model.graph.node.extend(
        [
            onnx.helper.make_node("ReduceSumSquare", [y.name], ["sum of squares"], keepdims=0),
            onnx.helper.make_node("Log", ["sum of squares"], ["scalar"]),
        ]
    )
    model.graph.output.insert(0, onnx.helper.make_tensor_value_info("scalar", onnx.TensorProto.FLOAT, []))
    return model


TRANSFORMS: dict[str, Transform] = {
    "value_and_grad": gg.value_and_grad,
    "vjp": gg.vjp,
    "jvp": gg.jvp,
    "hvp": gg.hvp,
}


def feeds_of(model: onnx.ModelProto, x: np.ndarray) -> dict[str, np.ndarray]:
    """``x``, and random numbers for tangents and cotangents."""
    rng, sizes = np.random.default_rng(1), {"n": len(x), "11*n": 11 * len(x)}
    feeds = {"x": x}
    for v in model.graph.input:
        if v.name != "x":
            dims = [
                d.dim_value if d.HasField("dim_value") else sizes[d.dim_param] for d in v.type.tensor_type.shape.dim
            ]
            feeds[v.name] = rng.normal(size=dims).astype(np.float32)
    return feeds


def assert_alike(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        scale = max(float(np.abs(value).max(initial=0.0)), 1e-3)
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4 * scale, err_msg=name)


@pytest.mark.sweep(0.03)
@pytest.mark.parametrize("rows", [8, "n"], ids=["fixed", "open"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, transform: str, rows: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "LEAST_WORK", 1)  # lower small layers, too
    model, x = scalar_of(name, rows), batches(name, 8, 1)[0]["x"]
    portable, lowered = (TRANSFORMS[transform](model, backend=t) for t in ("portable", "ort-cpu"))
    feeds = feeds_of(portable, x)
    assert_alike(run(lowered, feeds), run(portable, feeds))


@pytest.mark.sweep(0.274)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("backend", OTHERS)
def test_every_backend_gives_the_same_numbers(backend: str, transform: str) -> None:
    model, x = scalar_of("mlp", "n"), batches("mlp", 5, 1)[0]["x"]
    portable, written = TRANSFORMS[transform](model), TRANSFORMS[transform](model, backend=backend)
    feeds = feeds_of(portable, x)
    assert_alike(run(written, feeds), run(portable, feeds))


def test_what_a_backend_changes() -> None:
    relu = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }'
    )
    for transform in (gg.jvp, gg.vjp):
        found = {t: {n.op_type for n in transform(relu, wrt="x", backend=t).graph.node} for t in ("ort-cpu", "auto")}
        assert found == {"ort-cpu": {"Relu", "HardSigmoid", "Mul"}, "auto": {"Relu", "ReluGrad"}}
        assert "Greater" in {n.op_type for n in transform(relu, wrt="x").graph.node}  # portable by default


def test_a_file_for_one_machine_says_so() -> None:
    model = exported("mlp", "n")
    said = {t: {p.key: p.value for p in gg.jvp(model, backend=t).metadata_props} for t in ("portable", "ort-cpu")}
    assert BACKEND_KEY not in said["portable"]
    assert said["ort-cpu"][BACKEND_KEY] == f"ort-cpu, {BACKENDS['ort-cpu'].machine()}"
    again = gg.jvp(gg.vjp(model, backend="auto"), allow_unused=True)
    assert BACKEND_KEY not in {p.key for p in again.metadata_props}


def test_an_unknown_backend_is_refused() -> None:
    for transform in TRANSFORMS.values():
        with pytest.raises(BuildError, match=r"there is no backend 'ort-cp'; did you mean 'ort-cpu'"):
            transform(exported("mlp", "n"), backend="ort-cp")
    with pytest.raises(BuildError, match="there is no backend 'ort-cpu-native'"):
        gg.build(exported("mlp", "n"), backend="ort-cpu-native")


def test_the_command_line_offers_them_all() -> None:
    assert tuple(choices.BACKENDS.choices) == tuple(BACKENDS)


CASES = [
    pytest.param(r, c, id=f"{r.op_type}-{i}")
    for r in RULES.values()
    if r.op_type in PUSHES and not r.domain
    for i, c in enumerate(r.cases)
    if not c.onnxruntime
]


@pytest.mark.sweep(0.138)
@pytest.mark.parametrize(("rule", "case"), CASES)
def test_tangents_of_every_operator_that_has_its_own_way_for_them(rule: Rule, case: Case) -> None:
    t = cases.trial(rule, case, dtype=np.float32)
    rng = np.random.default_rng(1)
    feeds = t.feeds | {f"{x}.tangent": np.asarray(rng.normal(size=t.feeds[x].shape), np.float32) for x in t.wrt}
    portable, lowered = (
        gg.jvp(t.model, wrt=t.wrt, outputs=t.read, allow_unused=True, backend=backend)
        for backend in ("portable", "ort-cpu")
    )
    assert_alike(run(lowered, feeds), run(portable, feeds))

"""Runs whose feeds differ in few arrays: the same results, and only what depends on these arrays is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from gradgraph.verify import reference
from gradgraph.verify.check_gradients import check_gradients
from gradgraph.verify.reference import Oracle, RepeatedOracle

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
  g (double[2, 3] x, double[3] c, bool k) => (double[2, 3] y, double[2, 3] z)
  <double[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}>
  { t = Transpose(w) a = MatMul(x, t) b = Relu(a) y = Add(b, c)
    s = If (k) <then_branch = f () => (double[2, 3] p) { p = Sin(a) },
                else_branch = h () => (double[2, 3] q) { q = Cos(x) }>
    z = Mul(s, y) }"""
ALL = ["Transpose", "MatMul", "Relu", "Add", "If", "Mul"]
RNG = np.random.default_rng(0)
FEEDS = {"x": RNG.normal(size=(2, 3)), "c": RNG.normal(size=3), "k": np.array(True)}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that repeated oracles have computed, of the main graph."""
    found, compute = [], RepeatedOracle._compute

    def spy(self: RepeatedOracle, node: Any, *rest: Any) -> None:
        found.append(node.onnx_node.op_type)
        compute(self, node, *rest)

    monkeypatch.setattr(RepeatedOracle, "_compute", spy)
    return found


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, []),
        ({"c": np.ones(3)}, ["Add", "Mul"]),
        ({"k": np.array(False)}, ["If", "Mul"]),
        ({"x": np.ones((2, 3))}, ALL),
        ({"w": np.eye(3)}, ALL),
        ({name: array.copy() for name, array in FEEDS.items()}, ALL),
    ],
)
@pytest.mark.parametrize("remembers", [True, False])
def test_only_what_depends_on_changes_is_computed(
    changed: Mapping[str, Any], names: list[str], remembers: bool, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx.parser.parse_model(TEXT)
    if not remembers:
        monkeypatch.setattr(reference, "MOST_REMEMBERED", 0)
    plain, repeated = Oracle(model), RepeatedOracle(model)
    ran = []
    for feeds in (FEEDS, {**FEEDS, **changed}, FEEDS, {**FEEDS, "c": np.zeros(3)}):
        computed.clear()
        found, expected = repeated(feeds), plain(feeds)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
        ran.append(computed.copy())
    assert ran[0] == ALL
    assert ran[1] == names or not remembers


@pytest.mark.parametrize("node", ["RandomNormalLike(x)", "Dropout(x, half, yes)"])
def test_random_numbers_are_drawn_in_each_run(node: str) -> None:
    """Otherwise a random model would pass for a deterministic one."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (double[64] x) => (double[64] y)
        <double half = {{0.5}}, bool yes = {{1}}> {{ r = {node} y = Mul(r, x) }}"""
    repeated, feeds = RepeatedOracle(onnx.parser.parse_model(text)), {"x": np.ones(64)}
    assert not np.array_equal(repeated(feeds)["y"], repeated(feeds)["y"])


def test_a_failed_run_leaves_nothing_behind() -> None:
    model, repeated = onnx.parser.parse_model(TEXT), RepeatedOracle(onnx.parser.parse_model(TEXT))
    with pytest.raises(Exception, match="MatMul"):
        repeated({**FEEDS, "x": np.ones((2, 4))})
    found, expected = repeated(FEEDS), Oracle(model)(FEEDS)
    np.testing.assert_array_equal(found["z"], expected["z"])


@pytest.mark.parametrize("most", [reference.MOST_REMEMBERED, 256])  # 256: the inputs of two products
def test_a_check_computes_frozen_layers_once_for_each_model(
    most: int, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if memory is short: it is used for the inputs of what changes, not for the first values."""
    monkeypatch.setattr(reference, "MOST_REMEMBERED", most)
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[n, 8] x) => (float[n, 4] y)
        { a = MatMul(x, w) b = Tanh(a) c = MatMul(b, v) d = Tanh(c) y = MatMul(d, head) }"""
    model = onnx.parser.parse_model(text)
    for name, shape in {"w": (8, 8), "v": (8, 8), "head": (8, 4)}.items():
        weight = RNG.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    assert check_gradients(model, wrt="head").ok
    assert computed.count("Tanh") == 4  # two each in the model and in its gradient

"""The sanity checks of attributions: against plain references, and on attributions that explain nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser

from gradgraph.attributions.explained import Explainer, explain_samples
from gradgraph.attributions.sanity import random_weights, spearman
from tests.kit.command_line import arrays, mlp

PICTURES = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[N, 1, 6, 6] x) => (float[N, 3] logits) <float[3, 36] w = {W}> {
        f = Flatten (x)
        logits = Gemm <transB = 1> (f, w)
    }"""


def linear_on_pictures() -> ir.Model:
    weights = np.random.default_rng(0).normal(size=108).round(3)
    return ir.serde.deserialize_model(parser.parse_model(PICTURES.replace("W", ", ".join(map(str, weights)))))


def explained(model: ir.Model, x: np.ndarray, method: str = "input-x-gradient", **options: Any) -> Any:
    described = [{"index": i, "file": "", "text": ""} for i in range(len(x))]
    return explain_samples(Explainer(model, method, options, None, "cpu"), {"x": x}, described)


@pytest.mark.parametrize("seed", range(4))
def test_rank_correlation_is_that_of_scipy(seed: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 6, 40) * 1.0, rng.normal(size=40)  # with ties
    assert np.isclose(spearman(a, b), stats.spearmanr(a, b).statistic)
    assert np.isnan(spearman(np.ones(4), b[:4]))


def test_weights_are_shuffled_from_the_last_layer_and_restored() -> None:
    model = ir.serde.deserialize_model(mlp())
    before = {name: v.const_value.numpy().copy() for name, v in model.graph.initializers.items()}
    seen = []
    for layer, count in random_weights(model, np.random.default_rng(0)):
        now = {name: v.const_value.numpy() for name, v in model.graph.initializers.items()}
        seen.append((layer, count, {name for name, a in now.items() if (a != before[name]).any()}))
        for name, array in now.items():
            np.testing.assert_array_equal(np.sort(array, axis=None), np.sort(before[name], axis=None))
    assert seen == [("last.weight", 1, {"last.weight"}), ("first.weight", 2, {"first.weight", "last.weight"})]
    for name, value in model.graph.initializers.items():
        np.testing.assert_array_equal(value.const_value.numpy(), before[name])


def test_attributions_of_a_linear_model_pass_all_checks() -> None:
    """Its input × gradient is exact, so deletion and insertion follow from the sorted contributions."""
    x = np.random.default_rng(1).random((6, 1, 6, 6)).astype(np.float32) + 0.1
    model = linear_on_pictures()
    found = explained(model, x)
    assert found.checks.warnings == []
    weights = model.graph.initializers["w"].const_value.numpy().reshape(3, 36)
    scores = x.reshape(6, 36) @ weights.T
    contributions = np.sort(x.reshape(6, 36) * weights[scores.argmax(1)], axis=1)[:, ::-1]
    kept = [contributions[:, round(36 * i / 10) :].sum(1).mean() for i in range(11)]
    np.testing.assert_allclose(found.checks.curves["deletion"].by_attribution, kept, atol=1e-4)
    np.testing.assert_allclose(found.checks.curves["insertion"].by_attribution, kept[0] - np.array(kept), atol=1e-4)
    at_random = found.checks.curves["deletion"].at_random
    np.testing.assert_allclose(at_random[0], kept[0], atol=1e-4)
    assert abs(at_random[10]) < 1e-4


def test_integrated_gradients_of_a_linear_model_are_complete() -> None:
    x = np.random.default_rng(1).random((4, 1, 6, 6)).astype(np.float32)
    found = explained(linear_on_pictures(), x, "integrated-gradients", n=4)
    assert found.checks.incompleteness < 1e-5


class EdgeDetector(Explainer):
    """Attributions that are the edges of the picture, whatever the model."""

    def attributions(self, inputs: Any, targets: Any, again: bool = False) -> dict[str, np.ndarray]:
        x = inputs["x"]
        return {"x.attribution": np.abs(np.diff(x, axis=3, append=0))}


class Constant(Explainer):
    def attributions(self, inputs: Any, targets: Any, again: bool = False) -> dict[str, np.ndarray]:
        return {"x.attribution": np.ones_like(inputs["x"])}


CAUGHT = {
    EdgeDetector: "The attributions hardly depend on the model: with shuffled weights in all layers they would",
    Constant: "All attributions of a sample are equal, so they explain nothing.",
}


@pytest.mark.parametrize("kind", CAUGHT)
def test_attributions_that_do_not_depend_on_the_model_are_caught(kind: type[Explainer]) -> None:
    x = np.random.default_rng(1).random((6, 1, 6, 6)).astype(np.float32)
    described = [{"index": i, "file": "", "text": ""} for i in range(6)]
    found = explain_samples(kind(linear_on_pictures(), "gradient", {}, None, "cpu"), {"x": x}, described)
    assert found.checks is not None
    assert any(warning.startswith(CAUGHT[kind]) for warning in found.checks.warnings), found.checks


def test_the_wrong_order_is_caught() -> None:
    """Attributions with the opposite sign rank first what speaks against the class."""

    class Opposite(Explainer):
        def attributions(self, inputs: Any, targets: Any, again: bool = False) -> dict[str, np.ndarray]:
            return {name: -found for name, found in super().attributions(inputs, targets, again).items()}

    x = np.random.default_rng(1).random((6, 1, 6, 6)).astype(np.float32)
    described = [{"index": i, "file": "", "text": ""} for i in range(6)]
    model = Opposite(linear_on_pictures(), "input-x-gradient", {}, None, "cpu")
    found = explain_samples(model, {"x": x}, described)
    assert found.checks is not None
    assert "The order of the attributions does not matter to the model" in " ".join(found.checks.warnings)


def test_too_few_points_are_told() -> None:
    """One point at the start of the line misses what a Relu does on the way."""
    data = arrays(8)
    found = explained(
        ir.serde.deserialize_model(mlp()), data["x"] * 3, "integrated-gradients", n=1, rule="riemann_left"
    )
    assert found.checks.incompleteness > 0.05
    assert "increase the number of points (n)" in " ".join(found.checks.warnings)

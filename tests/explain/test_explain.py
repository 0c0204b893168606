"""``gg.explain`` beside formulas in NumPy: attributions, targets, tokens, options, errors."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.errors import GradgraphError
from gradgraph.explaining.methods import METHODS
from gradgraph.frontend import Input, Module, export, nn
from gradgraph.frontend import functional as F
from tests.kit.running import run

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 3)).astype(np.float32)


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 6), nn.Linear(6, 5)

    def forward(self, x: Any) -> Any:
        return self.two(F.relu(self.one(x)))


class Picture(Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(48, 2)

    def forward(self, x: Any) -> Any:
        return self.head(F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1))


class Words(Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids: Any) -> Any:
        return self.head(F.tanh(self.table(ids)).sum(1))


@pytest.fixture(scope="module")
def net() -> onnx.ModelProto:
    gg.frontend.manual_seed(0)
    return export(Net(), {"x": ("batch", 3)}, "y")


@pytest.fixture(scope="module")
def picture() -> onnx.ModelProto:
    gg.frontend.manual_seed(0)
    return export(Picture(), {"x": ("batch", 1, 8, 8)}, "y")


@pytest.fixture(scope="module")
def words() -> onnx.ModelProto:
    gg.frontend.manual_seed(0)
    return export(Words(), {"ids": Input(("batch", "n"), "int64")}, "y")


def scores(net: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return run(net, {"x": x.astype(np.float32)})["y"]


def test_targets(net: Any) -> None:
    labels = np.array([4, 0, 2, 2])
    fed = gg.explain(net, "gradient")
    assert [i.name for i in fed.graph.input] == ["x", "target"]
    assert [o.name for o in fed.graph.output] == ["y", "x.attribution"]
    result = run(fed, {"x": X, "target": labels})
    np.testing.assert_array_equal(result["y"], scores(net, X))
    for i, label in enumerate(labels):
        one = run(gg.explain(net, "gradient", target=int(label)), {"x": X})["x.attribution"]
        np.testing.assert_allclose(one[i], result["x.attribution"][i], rtol=1e-6)
    guess = run(gg.explain(net, "gradient", target="predicted"), {"x": X})["x.attribution"]
    again = run(fed, {"x": X, "target": result["y"].argmax(1)})["x.attribution"]
    np.testing.assert_allclose(guess, again, rtol=1e-6)
    chunked = gg.explain(net, "integrated-gradients", n=6, chunk=4)
    whole = gg.explain(net, "integrated-gradients", n=6)
    both = [run(m, {"x": X, "target": labels}) for m in (chunked, whole)]
    np.testing.assert_allclose(both[0]["x.attribution"], both[1]["x.attribution"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["integrated-gradients", "deeplift"])
def test_completeness(net: Any, method: str) -> None:
    options = {"n": 300} if method == "integrated-gradients" else {}
    result = run(gg.explain(net, method, target=1, baseline=0.2, **options), {"x": X})
    change = (scores(net, X) - scores(net, np.full_like(X, 0.2)))[:, 1]
    error = result["x.attribution"].sum(1) - change
    np.testing.assert_allclose(error, 0, atol=2e-3)
    np.testing.assert_allclose(result["completeness.error"], error, atol=1e-5)


def test_shapley_values_are_those_of_the_definition(net: Any) -> None:
    result = run(gg.explain(net, "shapley", target=3, exact=True), {"x": X})["x.attribution"]
    expected = np.zeros_like(X)
    orders = list(itertools.permutations(range(3)))
    for order in orders:
        point = np.zeros_like(X)
        for feature in order:
            before = scores(net, point)[:, 3]
            point[:, feature] = X[:, feature]
            expected[:, feature] += (scores(net, point)[:, 3] - before) / len(orders)
    np.testing.assert_allclose(result, expected, atol=1e-5)
    sampled = run(gg.explain(net, "shapley", target=3, n=7, features=np.array([0, 1, 1])), {"x": X})["x.attribution"]
    np.testing.assert_array_equal(sampled[:, 1], sampled[:, 2])
    change = (scores(net, X) - scores(net, np.zeros_like(X)))[:, 3]
    np.testing.assert_allclose(sampled[:, 0] + sampled[:, 1], change, atol=1e-5)


def test_occlusion_averages_windows(picture: Any) -> None:
    x = RNG.normal(size=(2, 1, 8, 8)).astype(np.float32)
    for options, extent, step in (({}, 1, 1), ({"window": (1, 3, 3), "stride": (1, 2, 2)}, 3, 2)):
        model = gg.explain(picture, "occlusion", target=0, baseline=0.5, **options)
        found = run(model, {"x": x})["x.attribution"]
        total, count = np.zeros_like(x), np.zeros_like(x)
        starts = range(0, step * -(-(8 - extent) // step) + 1, step)
        for i, j in itertools.product(starts, starts):
            window = (slice(None), slice(None), slice(i, i + extent), slice(j, j + extent))
            masked = x.copy()
            masked[window] = 0.5
            change = (scores(picture, x) - scores(picture, masked))[:, 0]
            total[window] += change[:, None, None, None]
            count[window] += 1
        np.testing.assert_allclose(found, total / count, atol=1e-5)


def test_tokens_get_attributions_at_their_embedding(words: Any) -> None:
    ids = np.array([[1, 8, 3], [0, 0, 5]])
    model = gg.explain(words, "integrated-gradients", target=2, n=200)
    result = run(model, {"ids": ids})
    assert [o.name for o in model.graph.output][:2] == ["y", "ids.attribution"]
    assert result["ids.attribution"].shape == (2, 3, 4)
    w = {t.name: onnx.numpy_helper.to_array(t) for t in words.graph.initializer}
    rows = w["table.weight"][ids]
    change = (np.tanh(rows) * w["head.weight"][2]).sum((1, 2))
    np.testing.assert_allclose(result["ids.attribution"].sum((1, 2)), change, rtol=1e-3, atol=1e-4)
    exact = np.tanh(rows) * w["head.weight"][2]  # the score is a sum over elements
    np.testing.assert_allclose(result["ids.attribution"], exact, rtol=1e-3, atol=1e-4)


def test_other_inputs_belong_to_their_samples() -> None:
    """With chunks, a mask is repeated along with the rows that it masks."""

    class Masked(Words):
        def forward(self, ids: Any, mask: Any) -> Any:
            return self.head((F.tanh(self.table(ids)) * F.cast(mask, "float32")[:, :, None]).sum(1) ** 2)

    gg.frontend.manual_seed(0)
    model = export(Masked(), {"ids": Input(("batch", "n"), "int64"), "mask": Input(("batch", "n"), "int64")}, "y")
    feeds = {"ids": np.array([[1, 8, 3], [0, 0, 5]]), "mask": np.array([[1, 0, 1], [1, 1, 0]])}
    labels = {"target": np.array([2, 0])}
    whole, chunked = (gg.explain(model, "integrated-gradients", n=5, chunk=c, inputs="ids") for c in (1, 4))
    found = [run(m, feeds | labels)["ids.attribution"] for m in (whole, chunked)]
    assert not found[0][0, 1].any() and not found[0][1, 2].any() and found[0].any()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_a_map_has_the_size_of_the_picture(picture: Any) -> None:
    x = RNG.normal(size=(2, 1, 8, 8)).astype(np.float32)
    result = run(gg.explain(picture, "grad-cam", target=1), {"x": x})["x.attribution"]
    small = run(gg.explain(picture, "grad-cam", target=1, resize=False), {"x": x})["x.attribution"]
    assert result.shape == (2, 1, 8, 8) and small.shape == (2, 1, 4, 4)  # the last layer is the pool's
    assert (result >= 0).all() and result.max() > 0
    named = gg.explain(picture, "grad-cam", target=1, resize=False, layer="conv/Conv")
    assert run(named, {"x": x})["x.attribution"].shape == (2, 1, 8, 8)


def test_outputs_with_one_number_and_with_more_axes(net: Any) -> None:
    sums = export(lambda x: (x * x).sum(1), {"x": ("batch", 3)}, "y")
    result = run(gg.explain(sums, "gradient"), {"x": X})
    np.testing.assert_allclose(result["x.attribution"], 2 * X, rtol=1e-6)
    cube = export(lambda x: x[:, :, None] * x[:, None, :], {"x": ("batch", 3)}, "y")
    result = run(gg.explain(cube, "gradient", target=(1, None)), {"x": X})["x.attribution"]
    expected = np.tile(X[:, 1:2], 3)
    expected[:, 1] += X.sum(1)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_attacks_find_other_classes(net: Any) -> None:
    before = scores(net, X).argmax(1)
    result = run(gg.explain(net, "deepfool", target="predicted", n=30), {"x": X})
    assert (result["y.adversarial"].argmax(1) != before).all()
    np.testing.assert_allclose(result["y.adversarial"], scores(net, result["x.adversarial"]), atol=1e-5)
    aimed = gg.explain(net, "pgd", epsilon=30.0, n=40, targeted=True, target=1, norm="l2", random_start=True, seed=1)
    result = run(aimed, {"x": X})
    assert (np.linalg.norm(result["x.adversarial"] - X, axis=1) <= 30.01).all()
    assert (result["y.adversarial"].argmax(1) == 1).mean() >= 0.75


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("GradCAM", {}, "there is no method 'GradCAM'; did you mean 'grad-cam'"),
        ("ig", {}, "did you mean 'integrated-gradients'"),
        ("wish", {}, "there is no method 'wish'; there is gradient"),
        ("gradient", {"n": 3}, "the method gradient has no option 'n'; there is absolute"),
        ("integrated-gradients", {"steps": 3}, "has no option 'steps'"),
        ("gradient", {"chunk": 2}, "chunk has no effect"),
        ("gradient", {"target": 5}, "there is no class 5: the output 'y' has the classes 0 to 4"),
        ("gradient", {"target": -1}, "there is no class -1"),
        ("gradient", {"target": "cat"}, "target is 'cat'"),
        ("gradient", {"target": (1, 2)}, "a tuple of 1 indices"),
        ("gradient", {"inputs": "z"}, "no input, initializer or inner value matches 'z'"),
        ("integrated-gradients", {"baseline": np.zeros(4)}, r"the baseline of 'x' has shape \[4\]"),
        ("integrated-gradients", {"n": 0}, "n is 0; it should be a whole number above zero"),
        ("integrated-gradients", {"rule": "simpson"}, "rule is 'simpson'; it should be one of"),
        ("expected-gradients", {}, "needs baselines="),
        ("expected-gradients", {"baselines": np.zeros((2, 4))}, "pass rows of shape"),
        ("expected-gradients", {"baselines": np.zeros((0, 3))}, "have no rows; pass at least one"),
        ("expected-gradients", {"baselines": {"z": np.zeros((2, 3))}}, "the argument baselines names 'z'"),
        ("expected-gradients", {"baselines": {}}, "the argument baselines has no entry for 'x'"),
        ("integrated-gradients", {"baseline": None}, "the baseline is None; pass a number"),
        ("grad-cam", {}, "the model has none before 'y'; its inner values are"),
        ("grad-cam", {"layer": "one/Gemm"}, "needs a layer with channels and spatial axes"),
        ("layer-conductance", {"layer": "nine"}, "no inner value matches layer='nine'"),
        ("attention-rollout", {}, "the model has none"),
        ("occlusion", {"window": (1, 2)}, "window is a tuple of int; pass a size above zero for each"),
        ("occlusion", {"window": 1, "stride": 2}, "some elements would be skipped"),
        ("shapley", {"features": np.zeros(3)}, "pass whole numbers from 0"),
        ("pgd", {"norm": "l1"}, "norm is 'l1'; it should be one of linf, l2"),
        ("pgd", {"epsilon": 0.0}, "epsilon is 0.0"),
        ("pgd", {"bounds": 3}, "bounds is 3"),
        ("pgd", {"bounds": (1, 0)}, "a lowest and a highest value in this order"),
        ("pgd", {"seed": 3}, "seed selects the random start"),
        ("shapley", {"exact": True, "n": 3}, "so n has no effect"),
        ("gradient", {"inputs": ["x", "one/Gemm"]}, "'one/Gemm' is computed from 'x'"),
        ("gradient", {"inputs": "one.weight"}, "'one.weight' of shape .* has no row for each sample"),
    ],
)
def test_errors_are_one_sentence(net: Any, method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GradgraphError, match=message):
        gg.explain(net, method, **{"target": 1, **options})


def test_inputs_without_a_row_per_sample_are_constants() -> None:
    model = export(lambda x, scale: x * scale, {"x": ("batch", 3), "scale": (3,)}, "y")
    scale = np.array([1, 2, 3], np.float32)
    found = run(gg.explain(model, target=1), {"x": X, "scale": scale})
    assert list(found) == ["y", "x.attribution", "completeness.error"]
    np.testing.assert_allclose(found["x.attribution"], X * scale * [0, 1, 0], rtol=1e-5)
    with pytest.raises(GradgraphError, match="no row for each sample"):
        gg.explain(model, target=1, inputs="scale")


def test_outputs_that_no_input_of_wrt_changes_keep_their_names() -> None:
    model = export(lambda x, z: {"y": (x * x).sum(1), "w": z * z}, {"x": ("batch", 3), "z": ("batch", 3)})
    found = run(gg.explain(model, "occlusion", inputs="z", output="y"), {"x": X, "z": X})
    assert list(found) == ["y", "z.attribution"] and not found["z.attribution"].any()


@pytest.mark.parametrize("method", ["deeplift", "deepfool"])
def test_float16_divides_by_no_zero(method: str) -> None:
    weights = (np.array([[1, -2], [2, 1], [1, 1]], np.float16), np.array([[1, -1, 2], [2, 1, 1]], np.float16))
    model = export(lambda x: F.relu(x @ weights[0]) @ weights[1], {"x": Input(("batch", 3), "float16")}, "y")
    x = np.array([[0, 0, 0], [-1, -1, -1], [1, 0, 1]], np.float16)  # no Relu of the second sample is active
    found = run(gg.explain(model, method, target=1), {"x": x})
    assert all(np.isfinite(y).all() for y in found.values())


def test_attacks_on_probabilities_that_are_0() -> None:
    model = export(lambda x: F.softmax(x * 100.0, -1), {"x": ("batch", 3)}, "y")
    x = np.array([[2, 0, -2]], np.float32)
    found = run(gg.explain(model, "pgd", target=2, targeted=True, epsilon=0.5, n=5), {"x": x})
    np.testing.assert_allclose(found["x.adversarial"], [[1.5, 0, -1.5]], atol=1e-6)


def test_other_models_that_do_not_fit(net: Any, words: Any) -> None:
    sums = export(lambda x: F.tanh(x).sum(1), {"x": ("batch", 3)}, "y")
    for method, message in (("deepfool", "needs an output"), ("guided-backpropagation", "needs Relu layers")):
        with pytest.raises(GradgraphError, match=message):
            gg.explain(sums, method)
    with pytest.raises(GradgraphError, match="has one number for each sample, so there is no class"):
        gg.explain(sums, "gradient", target=1)
    with pytest.raises(GradgraphError, match="needs fixed sizes after the first axis"):
        gg.explain(words, "occlusion", target=1)
    flags = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> g (int64[n] i) => (float[n] y) {'
                                    "y = Cast<to = 1>(i) }")  # fmt: skip
    with pytest.raises(GradgraphError, match="no floating-point input, and no input of token indices"):
        gg.explain(flags, "gradient")
    with pytest.raises(GradgraphError, match="is not floating-point, and no embedding reads it"):
        gg.explain(flags, "gradient", inputs="i")
    labels = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 3] x) => (int64[n] label, float[n, 3] p) {
        label = ArgMax<axis = 1, keepdims = 0>(x) p = Tanh(x) }""")
    with pytest.raises(GradgraphError, match=r"'label' is not a floating-point tensor \(floating-point: 'p'\); choose"):
        gg.explain(labels, "gradient")


@pytest.mark.parametrize(("x", "h", "y"), [("n", 1, "n"), (2, 1, 2), (1, 2, 1), ("n", 1, "other")])
def test_a_state_without_rows_of_samples(x: Any, h: int, y: Any) -> None:
    """Its attributions would be added to those of samples."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[{x}, 4] x, float[{h}, 4] h) => (float[{y}, 1] y) {{
        axes = Constant<value_ints = [1]>() rows = Constant<value_ints = [0]>()
        m = ReduceMean(h, rows) t = Mul(x, m) y = ReduceSum(t, axes) }}""")
    feeds = {"x": np.ones((x if isinstance(x, int) else 3, 4), np.float32), "h": np.full((h, 4), 2, np.float32)}
    found = run(gg.explain(model, "integrated-gradients", n=2), feeds)
    np.testing.assert_allclose(found["x.attribution"], np.full_like(feeds["x"], 2))
    np.testing.assert_allclose(found["completeness.error"], np.zeros(len(feeds["x"])), atol=1e-6)
    assert "h.attribution" not in found
    with pytest.raises(GradgraphError, match="has no row for each sample of the output 'y'; choose other inputs"):
        gg.explain(model, "integrated-gradients", inputs=["x", "h"])


@pytest.mark.parametrize(
    ("backend", "scans"), [("ort-cpu", True), ("web", True), ("openvino", False), ("tinygrad", False)]
)
def test_backends(backend: str, scans: bool, picture: Any) -> None:
    x = RNG.normal(size=(2, 1, 8, 8)).astype(np.float32)
    plain, model = (gg.explain(picture, n=3, target=1, backend=b) for b in ("portable", backend))
    assert any(node.op_type == "Scan" for node in model.graph.node) == scans
    for key, value in run(plain, {"x": x}).items():
        np.testing.assert_allclose(run(model, {"x": x})[key], value, rtol=1e-4, atol=1e-6)


def test_the_page_lists_every_method() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "explain.md").read_text(encoding="utf-8")
    for name, method in METHODS.items():
        assert f"`{name}`" in page
        assert all(f"`{option}`" in page for option in method.options)


def test_every_method_has_a_paper_and_words() -> None:
    for name, method in METHODS.items():
        assert method.name == name and ("arXiv" in method.paper or "doi" in method.paper) and method.write.__doc__


@pytest.mark.parametrize("name", list(METHODS))
def test_unrolled_models_have_no_scan(name: str, net: Any, picture: Any) -> None:
    options: dict[str, Any] = {"expected-gradients": {"baselines": np.eye(3), "n": 3}, "shapley": {"n": 2}}.get(
        name, {}
    )
    if name in ("integrated-gradients", "smoothgrad", "layer-conductance", "pgd", "deepfool"):
        options["n"] = 3
    if name == "layer-conductance":
        options["layer"] = "one/Gemm"
    if name == "attention-rollout":
        return  # in test_explain_torch.py
    model, x = (picture, RNG.normal(size=(2, 1, 8, 8)).astype(np.float32)) if "cam" in name else (net, X)
    models = [gg.explain(model, name, target=1, unroll=unroll, **options) for unroll in (False, True)]
    assert not any(node.op_type == "Scan" for node in models[1].graph.node)
    both = [run(m, {"x": x}) for m in models]
    for key, value in both[0].items():
        np.testing.assert_allclose(both[1][key], value, rtol=1e-4, atol=1e-6)

"""Several losses on several outputs, weights of samples, masks: values, gradients, and exact means over any batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph import losses
from gradgraph.step.manifest import Manifest
from tests.kit.running import Loop, resumed

RNG = np.random.default_rng(0)
N, C = 7, 4
X = RNG.normal(size=(N, C)).astype(np.float32)
BOXES = RNG.normal(size=(N, 2)).astype(np.float32)
LABELS = np.array([0, 3, -100, 1, 2, -100, 1])
WEIGHTS = np.array([1.0, 0.0, 2.0, 0.5, 1.0, 3.0, 0.25], np.float32)


def two_outputs(time: int = 0) -> onnx.ModelProto:
    """Class scores and boxes, each an input and a parameter added up."""
    shapes = {"classes": ["batch", C, *([time] if time else [])], "boxes": ["batch", 2]}
    nodes = [helper.make_node("Add", [f"x_{n}", f"w_{n}"], [n]) for n in shapes]
    inputs = [helper.make_tensor_value_info(f"x_{n}", 1, s) for n, s in shapes.items()]
    outputs = [helper.make_tensor_value_info(n, 1, s) for n, s in shapes.items()]
    weights = [onnx.numpy_helper.from_array(np.zeros([1, *s[1:]], np.float32), f"w_{n}") for n, s in shapes.items()]
    graph = helper.make_graph(nodes, "two", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


SEVERAL = {"boxes": ("l1", 0.5), "classes": losses.cross_entropy()}
FEEDS = {"x_classes": X, "x_boxes": BOXES, "boxes_target": BOXES * 0 + 1, "classes_target": LABELS}


def log_p(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def entropy(labels: np.ndarray = LABELS) -> np.ndarray:
    at = np.where(labels < 0, 0, labels)
    return np.where(labels < 0, 0.0, -np.take_along_axis(log_p(X), at[:, None], 1)[:, 0])


def test_several_losses_are_added_up() -> None:
    step = gg.build(two_outputs(), SEVERAL, gg.optim.sgd(1.0))
    assert [t.name for t in step.manifest.targets] == ["boxes_target", "classes_target"]
    assert [m.name for m in step.manifest.measures] == ["boxes_loss", "classes_loss", "loss", "classes_accuracy"]
    loop = Loop(step)
    found = loop(FEEDS)
    l1, ce = np.abs(BOXES - 1).mean(), entropy().sum() / (LABELS >= 0).sum()
    assert float(found["loss"]) == pytest.approx(0.5 * l1 + ce, rel=1e-5)
    np.testing.assert_allclose(-loop.state["w_boxes"], [0.5 * np.sign(BOXES - 1).sum(0) / BOXES.size], rtol=1e-5)


def test_one_output_has_several_losses_on_one_target() -> None:
    given = {"boxes": ["mse", ("l1", 0.5)], "classes": ["cross_entropy", (losses.focal(gamma=1.0), 2.0)]}
    step = gg.build(two_outputs(), given, gg.optim.sgd(1.0), metrics={"boxes": "mae", "classes": "accuracy"})
    assert [t.name for t in step.manifest.targets] == ["boxes_target", "classes_target"]
    assert list(step.manifest.loss["arguments"]) == [
        "boxes: mse", "boxes: l1", "classes: cross_entropy", "classes: focal",
    ]  # fmt: skip
    p = np.exp(-entropy())
    parts = {
        "boxes_mse": ((BOXES - 1) ** 2).mean(),
        "boxes_l1": np.abs(BOXES - 1).mean(),
        "classes_cross_entropy": entropy().sum() / (LABELS >= 0).sum(),
        "classes_focal": ((1 - p) * entropy()).sum() / (LABELS >= 0).sum(),
    }
    trainer = gg.Trainer(step, device="cpu")
    scores = trainer.evaluate(FEEDS, batch_size=7)
    for name, value in parts.items():
        assert scores[name] == pytest.approx(value, rel=1e-5)
    weights = (1.0, 0.5, 1.0, 2.0)
    whole = sum(w * v for w, v in zip(weights, parts.values(), strict=True))
    assert scores["loss"] == pytest.approx(whole, rel=1e-5)
    assert scores["boxes_mae"] == pytest.approx(parts["boxes_l1"], rel=1e-5)
    loop = Loop(step)
    assert float(loop(FEEDS)["loss"]) == pytest.approx(whole, rel=1e-5)
    slope = (2 * (BOXES - 1) + 0.5 * np.sign(BOXES - 1)).sum(0) / BOXES.size
    np.testing.assert_allclose(-loop.state["w_boxes"], [slope], rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["mse", "mse"], "the loss mse is listed twice for 'boxes'"),
        (["mse", "cross_entropy"], r"cross_entropy needs int64\[batch\], an earlier one float32\[batch, 2\]"),
        ([], "loss"),
    ],
)
def test_losses_that_do_not_go_together(given: list[str], says: str) -> None:
    with pytest.raises(gg.errors.GradgraphError, match=says):
        gg.build(two_outputs(), {"boxes": given})


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_each_is_a_column_that_does_not_depend_on_the_batches(batch_size: int, tmp_path: Path) -> None:
    """Labels that are ignored make batches of unequal weight."""
    gg.build(two_outputs(), SEVERAL, gg.optim.sgd(0.0)).save(tmp_path / "step")
    trainer = gg.Trainer(tmp_path / "step")
    feeds = FEEDS if batch_size > 2 else {n: a[LABELS >= 0] for n, a in FEEDS.items()}
    kept = LABELS >= 0 if batch_size <= 2 else slice(None)
    l1 = np.abs(BOXES - 1)[kept].mean()
    ce = entropy().sum() / (LABELS >= 0).sum()
    hits = (X.argmax(1) == LABELS).sum() / (LABELS >= 0).sum()
    expected = {"boxes_loss": l1, "classes_loss": ce, "loss": 0.5 * l1 + ce, "classes_accuracy": hits}
    found = trainer.evaluate(feeds, batch_size)
    history = trainer.fit(feeds, 1, batch_size, validation=feeds, learning_rate=0.0, progress=False)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5)
        assert history[name][-1] == pytest.approx(value, rel=1e-5)
        assert history[f"val_{name}"][-1] == pytest.approx(value, rel=1e-5)
    results = trainer.step(feeds, learning_rate=0.0)
    assert {n: float(v) for n, v in results.items()} == pytest.approx(expected, rel=1e-5)


def test_a_run_with_columns_of_sums_resumes_to_the_bit(tmp_path: Path) -> None:
    step = gg.build(two_outputs(), SEVERAL, gg.optim.adam(1e-2))
    feeds = {n: a[LABELS >= 0] for n, a in FEEDS.items()}
    again, _ = resumed(step, feeds, tmp_path, 4, epochs=3, batch_size=2)
    assert [i.name for i in again.export().graph.input] == ["x_classes", "x_boxes"]


@pytest.mark.parametrize("name", ["cross_entropy", "weights", "smoothing", "mse", "huber", "sum"])
def test_weights_of_samples(name: str) -> None:
    """As a row counts ``w`` times; the mean is over the weights."""
    loss = {"weights": losses.cross_entropy([1, 2, 0.5, 1]), "smoothing": losses.cross_entropy(label_smoothing=0.1),
            "sum": losses.mse("sum")}.get(name, name)  # fmt: skip
    output = "classes" if name in ("cross_entropy", "weights", "smoothing") else "boxes"
    target = LABELS if output == "classes" else BOXES * 0 + 0.3
    whole = np.array([1, 0, 2, 3, 1, 1, 2])
    step = gg.build(two_outputs(), loss, gg.optim.sgd(1.0), output=output, sample_weight=True)
    assert step.manifest.targets[-1].shape == ("batch",)
    plain = gg.build(two_outputs(), loss, gg.optim.sgd(1.0), output=output)
    fed = {"x_classes": X, "x_boxes": BOXES, "target": target}
    weighted, repeated = Loop(step), Loop(plain)
    found = weighted({**fed, "sample_weight": whole.astype(np.float32)})["loss"]
    expected = repeated({n: np.repeat(a, whole, 0) for n, a in fed.items()})["loss"]
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(weighted.state[f"w_{output}"], repeated.state[f"w_{output}"], rtol=1e-4, atol=1e-6)


def test_the_mean_over_batches_is_over_the_weights() -> None:
    step = gg.build(two_outputs(), "l1", gg.optim.sgd(1.0), output="boxes", sample_weight=True)
    fed = {"x_classes": X, "x_boxes": BOXES, "target": BOXES * 0, "sample_weight": WEIGHTS}
    expected = (np.abs(BOXES).mean(1) * WEIGHTS).sum() / WEIGHTS.sum()
    for size in (1, 2, 7):
        assert gg.Trainer(step).evaluate(fed, size)["loss"] == pytest.approx(expected, rel=1e-5)


def test_masks_of_elements() -> None:
    time = 3
    x, labels = RNG.normal(size=(N, C, time)).astype(np.float32), RNG.integers(0, C, (N, time))
    mask = RNG.random((N, time)) < 0.5
    mask[0] = False
    step = gg.build(two_outputs(time), "cross_entropy", gg.optim.sgd(1.0), mask=True, metrics=[])
    plain = gg.build(two_outputs(time), "cross_entropy", gg.optim.sgd(1.0), metrics=[])
    assert str(step.manifest.targets[-1]) == "mask bool[batch, 3]"
    fed = {"x_classes": x, "x_boxes": BOXES}
    masked, ignored = Loop(step), Loop(plain)
    found = masked({**fed, "target": labels, "mask": mask})["loss"]
    assert float(found) == pytest.approx(
        float(ignored({**fed, "target": np.where(mask, labels, -100)})["loss"]), rel=1e-6
    )
    np.testing.assert_allclose(masked.state["w_classes"], ignored.state["w_classes"], atol=1e-6)


def test_a_mask_without_elements_costs_nothing() -> None:
    step = gg.build(two_outputs(), "mse", gg.optim.sgd(1.0), output="boxes", mask=("batch",))
    loop = Loop(step)
    fed = {"x_classes": X, "x_boxes": BOXES, "target": BOXES + 1e9, "mask": np.zeros(N, bool)}
    assert float(loop(fed)["loss"]) == 0.0
    assert not loop.state["w_boxes"].any()
    kept = np.arange(N) < 3
    found = loop({**fed, "target": np.where(kept[:, None], BOXES - 1, BOXES + 1e9), "mask": kept})["loss"]
    assert float(found) == pytest.approx(1.0, rel=1e-5)


def test_a_mask_of_one_output_leaves_the_other_as_it_is() -> None:
    """Boxes count where something is, classes everywhere, as in a detector."""
    step = gg.build(two_outputs(), SEVERAL, gg.optim.sgd(1.0), mask={"boxes": 1}, metrics={"boxes": "mae"})
    assert str(step.manifest.targets[-1]) == "boxes_mask bool[batch]"
    kept = np.arange(N) % 3 == 0
    fed = {**FEEDS, "boxes_target": np.where(kept[:, None], BOXES * 0 + 1, np.float32(1e9)), "boxes_mask": kept}
    loop, l1, ce = Loop(step), np.abs(BOXES - 1)[kept].mean(), entropy().sum() / (LABELS >= 0).sum()
    assert float(loop(fed)["loss"]) == pytest.approx(0.5 * l1 + ce, rel=1e-5)
    moved = 0.5 * np.sign(BOXES - 1)[kept].sum(0) / BOXES[kept].size
    np.testing.assert_allclose(-loop.state["w_boxes"], [moved], rtol=1e-5)
    for size in (2, 7):
        scores = gg.Trainer(step).evaluate(fed, size)
        assert scores["boxes_loss"] == pytest.approx(l1, rel=1e-5)
        assert scores["boxes_mae"] == pytest.approx(l1, rel=1e-5)
        assert scores["classes_loss"] == pytest.approx(ce, rel=1e-5)


@pytest.mark.parametrize(("given", "shape"), [(True, ("batch", 2)), (1, ("batch",)), (("batch", 2), ("batch", 2))])
def test_how_far_a_mask_of_one_output_goes(given: Any, shape: tuple[Any, ...]) -> None:
    step = gg.build(two_outputs(), SEVERAL, mask={"boxes": given, "classes": False})
    assert [(t.name, t.shape) for t in step.manifest.targets[2:]] == [("boxes_mask", shape)]


def test_float16_models_have_sums_in_float32() -> None:
    """100 samples of weight 1000 with losses of 10 add up to a million."""
    x = np.tile(np.array([[10.0, 0.0]], np.float16), (100, 1))
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], "half",
        [helper.make_tensor_value_info("x", 10, ["batch", 2])], [helper.make_tensor_value_info("y", 10, ["batch", 2])],
        [onnx.numpy_helper.from_array(np.zeros(2, np.float16), "w")],
    )  # fmt: skip
    half = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    step = gg.build(half, "cross_entropy", gg.optim.sgd(0.0), sample_weight=True)
    feeds = {"x": x, "target": np.ones(100, np.int64), "sample_weight": np.full(100, 1000, np.float32)}
    assert gg.Trainer(step).evaluate(feeds, 30)["loss"] == pytest.approx(10.0, rel=1e-3)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no loss": ({"loss": {}}, "loss is an empty dict; pass a loss"),
    "an unknown output": ({"loss": {"boxs": "l1"}}, "no floating-point output 'boxs'; did you mean 'boxes'"),
    "an unknown loss": ({"loss": {"boxes": "l2"}}, "there is no loss 'l2'"),
    "a weight that is none": ({"loss": {"boxes": ("l1", "much")}}, "weight of the loss on 'boxes' is 'much'"),
    "a function among them": ({"loss": {"boxes": lambda x, t: x}}, "the loss is the function"),
    "none": ({"loss": {"boxes": None}}, "the loss for 'boxes' is None"),
    "an output, too": ({"loss": SEVERAL, "output": "boxes"}, "a dict of losses has outputs as keys"),
    "weights for a function": (
        {"loss": lambda out, batch: out["boxes"].mean(), "sample_weight": True},
        "do not apply to a loss function",
    ),
    "weights of a model's own": ({"loss": None, "output": "boxes", "mask": True}, "cannot be weighted by sample"),
    "too many axes": ({"loss": "l1", "output": "boxes", "mask": ("batch", 2, 1)}, "has 3 axes"),
    "a mask of no output": (
        {"loss": SEVERAL, "mask": {"boxs": True}},
        "no loss has 'boxs' as its first output; did you mean",
    ),
    "a mask of letters": (
        {"loss": SEVERAL, "mask": {"boxes": "all"}},
        "mask is a dict; it should be True, a shape, or a dict",
    ),
    "another reduction": (
        {"loss": losses.kl_div(reduction="batchmean"), "mask": True},
        "reduction of kl_div is 'batchmean'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_one_sentence(name: str) -> None:
    arguments, says = BAD[name]
    with pytest.raises(gg.GradgraphError, match=says) as caught:
        gg.build(two_outputs(), **arguments)
    assert "\n" not in str(caught.value)


def test_a_manifest_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    gg.build(two_outputs(), SEVERAL, "sgd").save(tmp_path / "step")
    path = tmp_path / "step" / "manifest.json"
    for change in ({"shape": [3]}, {"sums": "other"}, {"shape": ["batch"]}, {"name": 3}):
        manifest = json.loads(path.read_text("utf-8"))
        manifest["measures"][0] |= change
        with pytest.raises(gg.errors.ModelError):
            Manifest.from_json(json.dumps(manifest))
            changed = tmp_path / "changed"
            changed.mkdir(exist_ok=True)
            gg.Step(*(onnx.load(tmp_path / "step" / f"{n}.onnx") for n in ("train", "init", "eval")),
                    Manifest.from_json(json.dumps(manifest)))  # fmt: skip

"""Metrics from sums: against scikit-learn or their formula, over batches of any sizes, in training and evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from running import resumed

import gradgraph as gg
from gradgraph import metrics
from gradgraph.frontend import Input
from gradgraph.frontend import functional as F

RNG = np.random.default_rng(0)
N, C = 41, 4
SCORES = RNG.normal(size=(N, C)).astype(np.float32)
LABELS = RNG.integers(0, C - 1, N)  # the last class never occurs, and is called at times
YES = (RNG.random((N, 2)) < 0.4).astype(np.float32)
SIZES = (SCORES[:, :2] * 0.5 + RNG.normal(size=(N, 2)) + 3).astype(np.float32)


def model(*shapes: tuple[int, ...]) -> onnx.ModelProto:
    """Outputs y0, y1, …, each an input and a parameter added up."""
    count = range(len(shapes))
    dims = [["batch", *shape] for shape in shapes]
    graph = helper.make_graph(
        [helper.make_node("Add", [f"x{i}", f"w{i}"], [f"y{i}"]) for i in count],
        "shift",
        [helper.make_tensor_value_info(f"x{i}", 1, dims[i]) for i in count],
        [helper.make_tensor_value_info(f"y{i}", 1, dims[i]) for i in count],
        [onnx.numpy_helper.from_array(np.zeros((1, *shapes[i]), np.float32), f"w{i}") for i in count],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def matrix(called: np.ndarray, truth: np.ndarray, classes: int = C) -> np.ndarray:
    found = np.zeros((classes, classes))
    np.add.at(found, (truth.ravel(), called.ravel()), 1)
    return found


def by_sklearn(name: str, truth: np.ndarray, called: np.ndarray, **options: Any) -> Any:
    found = pytest.importorskip("sklearn.metrics", reason="compares with scikit-learn")
    return getattr(found, name)(truth.ravel(), called.ravel(), zero_division=0, **options)


CALLED = SCORES.argmax(1)
NLL = -(SCORES - np.log(np.exp(SCORES).sum(1, keepdims=True)))[np.arange(N), LABELS]
D = SCORES[:, :2] - SIZES
SKLEARN = {"precision": "precision_score", "recall": "recall_score", "f1": "f1_score", "iou": "jaccard_score"}

# the metric, its loss, prediction, target -> its value
CASES: dict[str, tuple[Any, str, np.ndarray, np.ndarray, Any]] = {
    **{
        f"{name}-{average}": (
            getattr(metrics, name)(average=average), "cross_entropy", SCORES, LABELS,
            lambda n=theirs, a=average: by_sklearn(n, LABELS, CALLED, average=None if a == "none" else a))
        for name, theirs in SKLEARN.items() for average in ("macro", "micro", "weighted", "none")
    },
    **{
        f"{name}-yes-or-no": (getattr(metrics, name)(average="binary"), "bce_with_logits", SCORES[:, :2], YES,
                              lambda n=theirs: by_sklearn(n, YES, SCORES[:, :2] > 0))
        for name, theirs in SKLEARN.items()
    },
    "balanced_accuracy": ("balanced_accuracy", "cross_entropy", SCORES, LABELS,
                          lambda: np.mean([(c == CALLED)[c == LABELS].mean() for c in range(C - 1)])),
    "confusion_matrix": ("confusion_matrix", "cross_entropy", SCORES, LABELS, lambda: matrix(CALLED, LABELS)),
    "accuracy": ("accuracy", "cross_entropy", SCORES, LABELS, lambda: (CALLED == LABELS).mean()),
    "accuracy-yes-or-no": ("accuracy", "bce_with_logits", SCORES[:, :2], YES,
                           lambda: ((SCORES[:, :2] > 0) == (YES > 0.5)).mean()),
    "accuracy-of-probabilities": ("accuracy", "bce", 1 / (1 + np.exp(-SCORES[:, :2])), YES,
                                  lambda: ((SCORES[:, :2] > 0) == (YES > 0.5)).mean()),
    "top_2": (metrics.top_k(2), "cross_entropy", SCORES, LABELS,
              lambda: (np.argsort(-SCORES, 1)[:, :2] == LABELS[:, None]).any(1).mean()),
    "top_5": ("top_k", "cross_entropy", SCORES, LABELS, lambda: 1.0),
    "perplexity": ("perplexity", "cross_entropy", SCORES, LABELS, lambda: np.exp(NLL.astype(np.float64).mean())),
    "mae": ("mae", "huber", SCORES[:, :2], SIZES, lambda: np.abs(D).mean()),
    "mse": ("mse", "huber", SCORES[:, :2], SIZES, lambda: (D**2).mean()),
    "rmse": ("rmse", "huber", SCORES[:, :2], SIZES, lambda: np.sqrt((D**2).mean())),
    "r2": ("r2", "huber", SCORES[:, :2], SIZES,
           lambda: (1 - (D**2).sum(0) / ((SIZES - SIZES.mean(0)) ** 2).sum(0)).mean()),
}  # fmt: skip


def test_every_metric_has_a_case() -> None:
    tried = {getattr(metric, "name", metric) for metric, *_ in CASES.values()}
    assert tried == {*metrics.METRICS} - {"token_accuracy"}  # which has a test of its own


@pytest.mark.parametrize("name", CASES)
def test_a_metric_is_exact_over_unequal_batches(name: str) -> None:
    metric, loss, x, target, value = CASES[name]
    step = gg.build(model(x.shape[1:]), loss, gg.optim.sgd(0.0), metrics=metric)
    column = name.split("-")[0]
    trainer, feeds = gg.Trainer(step), {"x0": x.astype(np.float32), "target": target}
    for size in (7, N):
        np.testing.assert_allclose(trainer.evaluate(feeds, size)[column], value(), rtol=2e-5)
    np.testing.assert_allclose(trainer.step(feeds, learning_rate=0.0)[column], value(), rtol=2e-5)


def test_a_metric_of_an_epoch_is_a_column_and_of_each_class_several() -> None:
    chosen = ["accuracy", "rmse"], ["accuracy", metrics.f1(average="none"), "confusion_matrix", "perplexity"]
    with pytest.raises(gg.errors.BuildError, match="compares numbers"):
        gg.build(model((C,)), "cross_entropy", metrics=chosen[0])
    step = gg.build(model((C,)), "cross_entropy", gg.optim.sgd(0.0), metrics=chosen[1])
    feeds = {"x0": SCORES, "target": LABELS}
    history = gg.Trainer(step).fit(feeds, 2, 6, validation=feeds, progress=False)
    assert step.manifest.metrics == ("accuracy",)
    columns = ["accuracy", "f1.0", "f1.1", "f1.2", "f1.3", "perplexity"]
    assert list(history) == ["epoch", "step", "loss", *columns, "val_loss", *(f"val_{c}" for c in columns)]
    for column in columns:
        np.testing.assert_allclose(history[column], history[f"val_{column}"], rtol=1e-5)


@pytest.mark.parametrize("time", [3])
def test_tokens_with_padding(time: int) -> None:
    x, target = RNG.normal(size=(N, time, C)).astype(np.float32), RNG.integers(0, C, (N, time))
    target[RNG.random((N, time)) < 0.3] = 0
    loss = gg.losses.cross_entropy(ignore_index=0, axis=-1)
    step = gg.build(model((time, C)), loss, gg.optim.sgd(0.0), metrics=["token_accuracy", "f1", "perplexity"])
    target[:, 0] = 1
    kept = target != 0
    found = gg.Trainer(step).evaluate({"x0": x, "target": target}, 9)
    assert found["token_accuracy"] == pytest.approx((x.argmax(-1) == target)[kept].mean())
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-5)
    found_f1 = by_sklearn("f1_score", target[kept], x.argmax(-1)[kept], average="macro")
    assert found["f1"] == pytest.approx(found_f1, rel=1e-5)


def test_masks_count_in_metrics_and_weights_do_not() -> None:
    mask = RNG.random(N) < 0.5
    step = gg.build(
        model((C,)), "cross_entropy", gg.optim.sgd(0.0), mask=True, sample_weight=True, metrics=["recall", "accuracy"]
    )
    feeds = {"x0": SCORES, "target": LABELS, "mask": mask, "sample_weight": RNG.random(N).astype(np.float32)}
    found = gg.Trainer(step).evaluate(feeds, 10)
    assert found["accuracy"] == pytest.approx((CALLED == LABELS)[mask].mean())
    assert found["recall"] == pytest.approx(by_sklearn("recall_score", LABELS[mask], CALLED[mask], average="macro"))


SEVERAL = {"y0": "cross_entropy", "y1": ("huber", 0.1)}
FEEDS = {"x0": SCORES, "x1": SCORES[:, :2], "y0_target": LABELS, "y1_target": SIZES}


def test_metrics_of_several_outputs() -> None:
    default = gg.build(model((C,), (2,)), SEVERAL, gg.optim.sgd(0.0))
    assert [m.name for m in default.manifest.measures] == ["y0_loss", "y1_loss", "loss", "y0_accuracy"]
    step = gg.build(model((C,), (2,)), SEVERAL, gg.optim.sgd(0.0), metrics={"y0": ["f1", "accuracy"], "y1": "rmse"})
    found = gg.Trainer(step).evaluate(FEEDS, 6)
    assert found["y0_accuracy"] == pytest.approx((CALLED == LABELS).mean())
    assert found["y1_rmse"] == pytest.approx(np.sqrt((D**2).mean()), rel=1e-5)
    assert "y0_f1" in found


def test_functions_are_metrics(tmp_path: Path) -> None:
    """A number is averaged over samples, a pair is a quotient of sums, and sums of a metric are finished as it is."""

    def width(out: Any, batch: Any) -> Any:
        return (out["y1"][:, 0] - out["y1"][:, 1]).abs().mean()

    step = gg.build(
        model((C,), (2,)), SEVERAL, gg.optim.sgd(0.0),
        metrics=[width, {
            "relative": lambda out, batch: ((out["y1"] - batch["y1_target"]).abs().sum(), batch["y1_target"].sum()),
            "sum": lambda out, batch: metrics.rmse()(out["y1"].sum(1), batch["y1_target"].sum(1)),
            "weight": lambda out, batch: out["w0"].square().sum(),
        }],
    )  # fmt: skip
    step.save(tmp_path / "step")
    found = gg.Trainer(tmp_path / "step").evaluate(FEEDS, 6)
    assert found["width"] == pytest.approx(np.abs(SCORES[:, 0] - SCORES[:, 1]).mean(), rel=1e-5)
    assert found["relative"] == pytest.approx(np.abs(D).sum() / SIZES.sum(), rel=1e-5)
    assert found["sum"] == pytest.approx(np.sqrt((D.sum(1) ** 2).mean()), rel=1e-5)
    assert found["weight"] == 0.0


def test_functions_beside_a_loss_that_is_one() -> None:
    """Targets by the names that the loss uses; inner values stay, and are no outputs."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 4] x) => (float[batch, 4] score) <float[4, 4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}> {
        h = MatMul (x, w)
        first = Tanh (h)
        second = Tanh (h)
        score = Add (first, second)
    }"""
    step = gg.build(
        onnx.parser.parse_model(text),
        lambda out, batch: F.cross_entropy(out["score"], batch["score"]),
        gg.optim.sgd(0.0),
        targets={"score": Input(("batch",), "int64")},
        metrics={"f1": lambda out, batch: metrics.f1()(out["score"], batch["score"]),
                 "inner": lambda out, batch: out["second"].mean()},
    )  # fmt: skip
    assert step.manifest.outputs == ("score",)
    found = gg.Trainer(step).evaluate({"x": SCORES, "score_target": LABELS}, 8)
    assert found["f1"] == pytest.approx(by_sklearn("f1_score", LABELS, CALLED, average="macro"), rel=1e-5)
    assert found["inner"] == pytest.approx(np.tanh(SCORES).mean(), rel=1e-4)


def test_resume_is_exact_to_the_bit(tmp_path: Path) -> None:
    step = gg.build(model((C,)), "cross_entropy", gg.optim.adam(1e-2), metrics=["f1", "confusion_matrix"])
    feeds = {"x0": SCORES, "target": LABELS}
    again, _ = resumed(step, feeds, tmp_path, 10, epochs=3, batch_size=6)
    assert [i.name for i in again.export().graph.input] == ["x0"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown one": ({"metrics": "f2"}, "there is no metric 'f2'"),
    "an unknown option": ({"metrics": "f1(avg='macro')"}, "has no argument 'avg'"),
    "no call": ({"metrics": "f1 + f1"}, "is no metric"),
    "an average": ({"metrics": "f1(average='mean')"}, "averages by one of"),
    "no scores": ({"metrics": "top_k(k=0)"}, "at least one"),
    "something else": ({"metrics": 3.5}, "a metric is 3.5"),
    "two of a name": ({"metrics": ["f1", metrics.f1("none")]}, "two metrics are called 'f1'"),
    "no name": ({"metrics": [lambda out, batch: 1]}, "needs a column"),
    "one argument": ({"metrics": {"m": lambda out: 1}}, "takes two arguments"),
    "no tensor": ({"metrics": {"m": lambda out, batch: 1}}, "returned 1; return a scalar"),
    "a vector": ({"metrics": {"m": lambda out, batch: out["y0"]}}, "returned no scalar"),
    "another output": ({"metrics": {"y1": "f1"}}, "no loss compares 'y1'"),
    "labels of numbers": ({"loss": "mse", "metrics": "f1"}, "needs a loss on class numbers"),
    "which of several": ({"loss": {"y0": "mse", "y1": "l1"}, "metrics": "mae"}, "say which output it is of"),
    "beside a function": ({"loss": lambda out, batch: out["y0"].mean(), "metrics": "mae"}, "write it as a function"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_one_sentence(name: str) -> None:
    arguments, says = BAD[name]
    with pytest.raises(gg.GradgraphError, match=says) as caught:
        gg.build(model((C,), (2,)), **arguments)
    assert "\n" not in str(caught.value)

"""Metrics of random data are those of scikit-learn over all rows, however these are cut into batches."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx.parser
import pytest

import gradgraph as gg

metrics = pytest.importorskip("sklearn.metrics", reason="compares with scikit-learn")

C = 4
BY_CLASS = ("precision", "recall", "f1", "iou")
THEIRS = {"precision": "precision_score", "recall": "recall_score", "f1": "f1_score", "iou": "jaccard_score"}


def scores(width: int, *more: str) -> onnx.ModelProto:
    shape = ", ".join(["batch", *more, str(width)])
    ones = ", ".join(["1"] * width)
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[{shape}] x) => (float[{shape}] y) '
        f"<float[{width}] w = {{{ones}}}> {{ y = Mul(x, w) }}"
    )


def theirs(name: str, truth: Any, called: Any, **given: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(metrics, THEIRS[name])(truth, called, zero_division=0, **given)


@pytest.mark.sweep(0.019)
@pytest.mark.parametrize("number", range(300))
def test_shares_of_classes_and_labels(number: int) -> None:
    rng = np.random.default_rng(number)
    kind, rows = ("classes", "several labels", "yes or no")[number % 3], int(rng.integers(4, 40))
    average = str(rng.choice(["macro", "micro", "weighted", "none"]))
    given = {"average": None if average == "none" else average}
    width = 1 if kind == "yes or no" else C
    x = rng.normal(size=(rows, width)).astype(np.float32)
    masked = rng.random() < 0.4
    mask = rng.random(rows) < 0.7 if masked else np.ones(rows, bool)
    mask[0] = True
    asked = [getattr(gg.metrics, name)(average=average) for name in BY_CLASS]
    options: dict[str, Any] = {"train": ["w"], "metrics": asked, "mask": ["batch"] if masked else False}
    if kind == "classes":
        target: np.ndarray = rng.integers(0, C - 1, rows)  # one class never occurs
        counted, found = mask.copy(), x.argmax(1)
        if rng.random() < 0.5:
            ignored = rng.random(rows) < 0.4
            ignored[0] = False
            target[ignored], counted = -100, counted & ~ignored
        step = gg.build(scores(C), gg.losses.cross_entropy(weight=[1, 2, 3, 0.5]), **options)
        given |= {} if average != "none" else {"labels": range(C)}
        pair: tuple[Any, Any] = target[counted], found[counted]
    else:
        target = (rng.random((rows, width)) < rng.random(width)).astype(np.float32)
        target[:, -1:] *= rng.random() < 0.7  # a label that nothing has
        pair = target[mask] > 0.5, x[mask] > 0
        if width == 1:
            pair = pair[0][:, 0], pair[1][:, 0]
            given |= {} if average != "none" else {"labels": [False, True]}
        step = gg.build(scores(width), "bce_with_logits", **options)
    data = {"x": x, "target": target, **({"mask": mask} if masked else {})}
    trainer = gg.Trainer(step, device="cpu")
    for size in (rows, int(rng.integers(1, rows)), 3):
        evaluated = trainer.evaluate(data, batch_size=size)
        for name in BY_CLASS:
            np.testing.assert_allclose(evaluated[name], theirs(name, *pair, **given), atol=1e-6, err_msg=name)


@pytest.mark.sweep(0.07)
@pytest.mark.parametrize("number", range(100))
def test_variances_keep_their_digits_at_any_mean(number: int) -> None:
    rng = np.random.default_rng(number)
    mean, spread = rng.choice([0.0, 1e-3, 1.0, -50.0, 1e4, 1e6, -3e7]), 10.0 ** rng.integers(-2, 3)
    width, rows = int(rng.integers(1, 4)), int(rng.integers(20, 200))
    t = (mean + spread * (rng.normal(size=(rows, width)) + np.linspace(0, 3, rows)[:, None])).astype(np.float32)
    x = (t + spread * rng.normal(0.2, 0.5, size=t.shape)).astype(np.float32)
    if number % 10 == 0:
        t[:, 0] = np.float32(mean + 0.1)  # all the same
    trainer = gg.Trainer(
        gg.build(scores(width), "mse", train=["w"], metrics=["r2", "explained_variance"]), device="cpu"
    )
    for size in (rows, 7):
        found = trainer.evaluate({"x": x, "target": t}, batch_size=size)
        pair = t.astype(np.float64), x.astype(np.float64)
        assert found["r2"] == pytest.approx(metrics.r2_score(*pair), abs=1e-6, rel=1e-6)
        assert found["explained_variance"] == pytest.approx(metrics.explained_variance_score(*pair), abs=1e-6, rel=1e-6)

"""Where nothing in a batch counts, loss and gradients are 0 and weights stay as they are, in a step and a Trainer.

A column that is a mean over nothing (a metric, one of several losses) is NaN, which no monitor takes for the best.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.metrics import METRICS
from gradgraph.runtime.saved.monitor import Monitor
from tests.kit.running import Loop

MODEL = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> g (float[batch, 4] x) => (float[batch, 3] y) '
    "<float[4, 3] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.1, 0.2, 0.3}> { y = MatMul(x, w) }"
)
TWO = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> g (float[batch, 4] x) => (float[batch, 3] y, float[batch, 3] z) '
    "<float[4, 3] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.1, 0.2, 0.3}, float[4, 3] v = {0.9, 0.2, 0.3, "
    "0.1, 0.5, 0.6, 0.2, 0.8, 0.9, 0.1, 0.2, 0.7}> { y = MatMul(x, w) z = MatMul(x, v) }"
)
LABELS, VALUES, SHARES = np.zeros(8, np.int64), np.ones((8, 3), np.float32), np.full((8, 3), 1 / 3, np.float32)
UNWEIGHTED, UNSEEN = np.zeros(8, np.float32), np.zeros(8, bool)
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, np.ndarray]]] = {  # a loss, options, what is fed
    "class weight": (gg.losses.cross_entropy(weight=[0.0, 1.0, 1.0]), {}, {"target": LABELS}),
    "sample weight": ("mse", {"sample_weight": True}, {"target": VALUES, "sample_weight": UNWEIGHTED}),
    "mask": ("mse", {"mask": ["batch"]}, {"target": VALUES, "mask": UNSEEN}),
    "labels and weights": (
        "cross_entropy", {"sample_weight": True}, {"target": LABELS, "sample_weight": UNWEIGHTED},
    ),
    "shares of classes": (
        "soft_cross_entropy", {"sample_weight": True}, {"target": SHARES, "sample_weight": UNWEIGHTED},
    ),
    "shares and mask": ("soft_cross_entropy", {"mask": ["batch"]}, {"target": SHARES, "mask": UNSEEN}),
    "labels and mask": ("cross_entropy", {"mask": True}, {"target": LABELS, "mask": UNSEEN}),
}  # fmt: skip
CLIPPED = gg.optim.chain(gg.optim.clip_by_global_norm(1.0), gg.optim.sgd(0.1))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "norm": {"grad_norm": True}, "accumulate": {"accumulate": True}, "separate": {"separate": True},
    "clipped": {"optimizer": CLIPPED}, "clipped, norm": {"optimizer": CLIPPED, "grad_norm": True},
    "half": {"precision": "float16"},
}  # fmt: skip


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", CASES)
def test_nothing_counts(name: str, option: str) -> None:
    loss, options, targets = CASES[name]
    batch = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32), **targets}
    chosen = {"optimizer": gg.optim.sgd(0.1), **options, **OPTIONS[option]}
    step = gg.build(MODEL, loss=loss, metrics=(), **chosen)
    trainer = gg.Trainer(step)
    assert float(trainer.step(batch)["loss"]) == 0.0
    trainer.fit(batch, epochs=1, batch_size=4)
    assert trainer.history.row()["loss"] == 0.0
    assert trainer.evaluate(batch)["loss"] == 0.0
    np.testing.assert_array_equal(trainer.state_dict()["w"], onnx.numpy_helper.to_array(MODEL.graph.initializer[0]))
    if option == "plain":
        assert float(Loop(step)(batch)["loss"]) == 0.0


# --- losses beside one that counts ------------------------------------------------------------------------------


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("option", [o for o in OPTIONS if o != "half"])
@pytest.mark.parametrize("what", ["mask", "class weight"])
def test_one_loss_of_two_counts_nothing(what: str, option: str) -> None:
    """The other one trains as it would alone; the column of the first is a mean over nothing."""
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    batch: dict[str, Any] = {"x": x, "z_target": VALUES}
    if what == "mask":
        loss, more = {"y": "mse", "z": "mse"}, {"mask": {"y": True}}
        batch |= {"y_target": VALUES, "y_mask": np.zeros((8, 3), bool)}
    else:
        loss, more = {"y": gg.losses.cross_entropy(weight=[0.0, 1.0, 1.0]), "z": "mse"}, {}
        batch["y_target"] = LABELS
    chosen = {"optimizer": gg.optim.sgd(0.1), "metrics": (), **OPTIONS[option]}
    both, alone = (
        gg.Trainer(gg.build(TWO, loss=loss, **more, **chosen)),
        gg.Trainer(gg.build(TWO, {"z": "mse"}, **chosen)),
    )
    for _ in range(2):
        found, wanted = both.step(batch), alone.step({"x": x, "z_target": VALUES})
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        assert np.isnan(found["y_loss"]) and found["z_loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    np.testing.assert_allclose(both.state_dict()["v"], alone.state_dict()["v"], rtol=1e-6)
    np.testing.assert_array_equal(both.state_dict()["w"], onnx.numpy_helper.to_array(TWO.graph.initializer[0]))
    counts = batch | ({"y_mask": np.arange(8)[:, None] * np.ones((1, 3)) >= 4} if what == "mask" else {})
    if what == "class weight":
        counts["y_target"] = np.array([0] * 4 + [1, 2, 1, 2])
    scores = [both.evaluate(counts, batch_size=size)["y_loss"] for size in (4, 8)]  # of two batches the first is empty
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("option", [o for o in OPTIONS if o != "half"])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_nothing_counts_in_distillation(alpha: float, option: str) -> None:
    teacher = onnx.ModelProto.FromString(MODEL.SerializeToString())
    teacher.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    model = gg.distill(MODEL, teacher, alpha=alpha)
    chosen = {"optimizer": gg.optim.sgd(0.1), "metrics": (), **OPTIONS[option]}
    step = gg.build(model, "cross_entropy", mask=True, **chosen)
    trainer = gg.Trainer(step)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    before = trainer.state_dict()["w"].copy()
    targets = {s.name: LABELS if s.dtype == "int64" else UNSEEN for s in step.manifest.targets}
    assert float(trainer.step({"x": x, **targets})["loss"]) == 0.0
    np.testing.assert_array_equal(trainer.state_dict()["w"], before)


# --- columns that are means over nothing ------------------------------------------------------------------------

OF_NUMBERS = ("mae", "mse", "rmse", "r2", "mape", "explained_variance", "reward_accuracy")
OF_SEQUENCES = ("edit_distance", "cer", "wer")  # test_metrics.py has them
OF_LABELS = [m for m in METRICS if m not in OF_NUMBERS + OF_SEQUENCES]


@pytest.mark.sweep(0.26)
@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("name", OF_LABELS)
def test_a_metric_of_nothing_is_nothing(name: str, average: str) -> None:
    """NaN, or what stands for 'no relation' (mcc) or for no counts (a matrix of zeros); a warning would be an error."""
    metric = getattr(gg.metrics, name)
    averaged = "average" in inspect.signature(metric).parameters
    if not averaged and average != "macro":
        return
    step = gg.build(MODEL, "cross_entropy", mask=True, metrics=[metric(average=average) if averaged else metric()])
    batch = {"x": np.ones((8, 4), np.float32), "target": LABELS, "mask": UNSEEN}
    scores = gg.Trainer(step).evaluate(batch, batch_size=4)
    (value,) = (v for column, v in scores.items() if column != "loss")
    assert np.isnan(value).all() or (not np.any(value) and name in ("mcc", "confusion_matrix"))


def test_a_mean_over_nothing_is_never_the_best_epoch() -> None:
    """The epoch whose labels all fell behind the mask is passed over, first, last or between others."""
    nan = float("nan")
    for values in ([nan, 0.5, 0.7], [0.5, nan, 0.7], [0.5, 0.7, nan], [nan, nan, 0.7]):
        best, at = None, -1
        for i, value in enumerate(values):
            if Monitor("accuracy").is_better(value, best):
                best, at = value, i
        assert best == max(v for v in values if v == v) and values[at] == best
        plateau = gg.optim.reduce_on_plateau(1.0, patience=3, monitor="accuracy", mode="max")
        assert plateau.rate({"accuracy": values}) == 1.0

"""What the best epoch is: column, direction, and by how much."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradgraph.errors import ArgumentError, DataError
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.saved.checkpoint import CheckpointKeeper
from gradgraph.runtime.saved.monitor import Monitor
from gradgraph.runtime.trainer import Trainer
from tests.kit import handmade

QUIET = RuntimeOptions(threads=1)
HELD_OUT = handmade.points(40, seed=5)


def trainer() -> Trainer:
    return Trainer(handmade.classifier(), device="cpu", options=QUIET)


def fit(t: Trainer, **options: Any) -> Any:
    """Good steps, then far too large ones."""
    rate = lambda step: 0.2 if step < 6 else 10.0  # noqa: E731
    return t.fit(handmade.points(96), batch_size=32, learning_rate=rate, validation=HELD_OUT, progress=False, **options)


@pytest.mark.parametrize(
    ("monitor", "value", "best", "better"),
    [
        (Monitor(), 1.0, None, True),
        (Monitor(), 0.9, 1.0, True),
        (Monitor(), 1.0, 1.0, False),
        (Monitor(min_delta=0.1), 0.95, 1.0, False),
        (Monitor(min_delta=0.1), 0.85, 1.0, True),
        (Monitor("val_accuracy"), 0.9, 1.0, False),
        (Monitor("val_accuracy"), 1.1, 1.0, True),
        (Monitor("val_f1.0", min_delta=0.2), 1.1, 1.0, False),
        (Monitor("score", "max"), 1.1, 1.0, True),
        (Monitor("val_accuracy", "min"), 0.9, 1.0, True),
        (Monitor(), math.nan, 1.0, False),
        (Monitor(), 1.0, math.nan, True),
        (Monitor(), math.nan, math.nan, False),
    ],
)
def test_better(monitor: Monitor, value: float, best: float | None, better: bool) -> None:
    assert monitor.is_better(value, best) is better


def test_patience_watches_the_column_that_is_named() -> None:
    t = trainer()
    history = fit(t, epochs=40, patience=3, monitor="val_accuracy")
    column = history["val_accuracy"]
    assert history.restored == int(np.argmax(column)) == len(column) - 4
    assert t.evaluate(HELD_OUT)["accuracy"] == pytest.approx(max(column))


def test_small_improvements_do_not_count() -> None:
    history = fit(trainer(), epochs=40, patience=1, min_delta=100.0)
    assert len(history) == 2
    assert history.restored == 0


def test_a_resumed_run_that_monitors_something_else_begins_to_look_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.ckpt"
    fit(trainer(), epochs=9, patience=5, checkpoint=path, max_steps=9)
    for monitor, warned in ((None, False), ("val_accuracy", True)):
        caplog.clear()
        again = Trainer.resume(handmade.classifier(), path, device="cpu", options=QUIET)
        fit(again, epochs=4, patience=5, monitor=monitor, checkpoint=tmp_path / "run.ckpt")
        assert ("a column other than 'val_accuracy'" in caplog.text) is warned


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"patience": 1, "monitor": "val_accuracies"}, "no column 'val_accuracies' to monitor; did you mean"),
        ({"patience": 1, "monitor": "val_loss", "validation": None}, "to monitor; pass validation data"),
        ({"monitor": "val_loss"}, "pass patience="),
        ({"min_delta": 0.5}, "pass patience="),
    ],
)
def test_refused_before_the_first_step(options: dict[str, Any], says: str) -> None:
    t = trainer()
    with pytest.raises(DataError, match=says):
        t.fit(handmade.points(48), **{"validation": HELD_OUT, "progress": False, **options})
    assert t.progress.steps == 0


@pytest.mark.parametrize("options", [{"mode": "up"}, {"min_delta": -1.0}, {"monitor": 3}])
def test_wrong_kinds(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        trainer().fit(handmade.points(48), patience=1, **options)


def test_names_that_say_nothing_need_a_mode(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"'val_score' does not imply whether higher or lower values are better; pass mode='max'"
    ):
        CheckpointKeeper(tmp_path, monitor="val_score")
    CheckpointKeeper(tmp_path, monitor="val_score", mode="max")


def test_a_keeper_of_an_accuracy_keeps_the_highest(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path, monitor="val_accuracy")
    t = trainer()
    history = fit(t, epochs=8, callbacks=[keeper])
    best = Trainer.resume(handmade.classifier(), keeper.best, device="cpu", options=QUIET)
    assert best.history["val_accuracy"][-1] == max(history["val_accuracy"]) > min(history["val_accuracy"])


@pytest.mark.sweep(0.08)
@pytest.mark.parametrize("stop", [2, 7, 12])
def test_a_resumed_run_stops_and_goes_back_as_the_whole_one(tmp_path: Path, stop: int) -> None:
    """Interrupted before the best epoch, at it, or after it."""
    options: dict[str, Any] = {"epochs": 40, "patience": 3, "monitor": "val_accuracy", "min_delta": 0.01}
    whole = trainer()
    history = fit(whole, checkpoint=tmp_path / "whole.ckpt", **options)
    path = tmp_path / "run.ckpt"
    fit(trainer(), checkpoint=path, **options, callbacks=[Stop(stop)])
    again = Trainer.resume(handmade.classifier(), path, device="cpu", options=QUIET)
    resumed = fit(again, checkpoint=path, **options)
    assert resumed == history
    assert resumed.restored == history.restored
    assert all(np.array_equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())


class Stop:
    """As Ctrl-C does, but for the exit: the run ends after so many steps, and saves."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step(self, t: Trainer, results: Any) -> bool:
        return t.progress.steps >= self.steps

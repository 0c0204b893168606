"""fit(eval_every=...): rows, early stopping, the best state and resuming go by evaluations within epochs."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.cli.app import run
from gradgraph.errors import DataError
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.loop.fit import Fit
from gradgraph.runtime.saved.checkpoint import checkpoint_pieces
from gradgraph.runtime.saved.record import body_of, from_text
from gradgraph.runtime.trainer import Trainer
from tests.kit import handmade
from tests.kit.command_line import arrays, mlp

DATA, HELD_OUT = handmade.points(112), handmade.points(32, seed=5)  # 7 batches an epoch


def trainer() -> Trainer:
    return Trainer(handmade.classifier(), device="cpu", options=RuntimeOptions(threads=1))


def fit(t: Trainer, **options: Any) -> dict[str, list[float]]:
    given = {"epochs": 3, "batch_size": 16, "eval_every": 3, "validation": HELD_OUT, "learning_rate": 0.05} | options
    return t.fit(DATA, progress=False, **given)


def test_a_row_every_few_steps_and_one_at_the_end() -> None:
    t, seen = trainer(), []

    class Rows:
        def on_epoch(self, trainer: Trainer, row: dict[str, float]) -> None:
            seen.append((row["step"], row["val_loss"], trainer.evaluate(HELD_OUT)["loss"]))

    history = fit(t, epochs=2, callbacks=[Rows()])
    assert history["step"] == [3, 6, 9, 12, 14] and history["epoch"] == [1, 1, 2, 2, 2]
    assert [step for step, _, _ in seen] == history["step"]
    assert all(row == pytest.approx(now, rel=1e-6) for _, row, now in seen)
    other = trainer()  # the loss of a row is that of the steps since the one before
    losses = [float(other.step(batch, learning_rate=0.05)["loss"]) for batch in list(_batches(other))[:6]]
    assert history["loss"][:2] == pytest.approx([np.mean(losses[:3]), np.mean(losses[3:])], rel=1e-5)


def _batches(t: Trainer) -> Any:
    return t.prepare(DATA, 16).batches(0)


@pytest.mark.sweep(0.4)
@pytest.mark.parametrize("stop", [1, 3, 5, 6, 7, 8, 14, 20])
def test_a_resumed_run_has_the_same_bits(stop: int, tmp_path: Path) -> None:
    """Stopped before, at and behind an evaluation and the end of an epoch: state, rows and log are those of one run."""
    whole = trainer()
    fit(whole, log=tmp_path / "whole.jsonl", log_every=2, patience=9)
    first = trainer()
    fit(first, checkpoint=tmp_path / "run.ckpt", max_steps=stop, log=tmp_path / "log.jsonl", log_every=2, patience=9)
    again = Trainer.resume(
        handmade.classifier(), tmp_path / "run.ckpt", device="cpu", options=RuntimeOptions(threads=1)
    )
    fit(again, checkpoint=tmp_path / "run.ckpt", log=tmp_path / "log.jsonl", log_every=2, patience=9)
    assert image(again) == image(whole)
    assert records(tmp_path / "log.jsonl") == records(tmp_path / "whole.jsonl")


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_row_behind_the_checkpoint_is_logged_once(kind: str, tmp_path: Path) -> None:
    """Killed between an evaluation and the next checkpoint: the evaluation is done again, and stands there once."""

    def killed(trainer: Trainer, row: dict[str, float]) -> None:
        if row["step"] == 6:
            raise KeyError("killed")

    log, path = tmp_path / f"log.{kind}", tmp_path / "run.ckpt"
    options: dict[str, Any] = {"checkpoint": path, "checkpoint_every": 3, "log": log, "log_every": 2}
    with pytest.raises(KeyError):
        fit(trainer(), **options, callbacks=[type("Kills", (), {"on_epoch": staticmethod(killed)})()])
    again = Trainer.resume(handmade.classifier(), path, device="cpu", options=RuntimeOptions(threads=1))
    assert again.progress.steps == 6
    fit(again, **options)
    fit(whole := trainer(), log=tmp_path / f"whole.{kind}", log_every=2)
    assert image(again) == image(whole)
    told = [[(r["event"], int(r["step"])) for r in _records(tmp_path / f"{name}.{kind}")] for name in ("log", "whole")]
    assert sorted(told[0]) == sorted(told[1])


def _records(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        return list(csv.DictReader(path.read_text().splitlines()))
    return [json.loads(line) for line in path.read_text().splitlines()]


def image(t: Trainer) -> bytes:
    return b"".join(checkpoint_pieces(t.state_dict(), t.progress))


def records(path: Path) -> list[tuple[str, int, float]]:
    return [(r["event"], r["step"], r["loss"]) for r in map(json.loads, path.read_text().splitlines())]


def test_an_evaluation_that_was_interrupted_is_done_after_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer()
    fit(whole)
    validate, calls = Fit._validate, []

    def interrupted(self: Fit, source: Any, received: Any) -> dict[str, float]:
        calls.append(self.progress.steps)
        if calls == [3, 6]:
            received.signal = signal.SIGINT
            return {}
        return validate(self, source, received)

    monkeypatch.setattr(Fit, "_validate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer(), checkpoint=tmp_path / "run.ckpt")
    monkeypatch.setattr(Fit, "_validate", validate)
    again = Trainer.resume(
        handmade.classifier(), tmp_path / "run.ckpt", device="cpu", options=RuntimeOptions(threads=1)
    )
    fit(again)
    assert image(again) == image(whole)


def test_patience_counts_evaluations_and_the_best_of_them_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = lambda step: 0.1 if step < 6 else 3.0  # noqa: E731 - far too high
    t = trainer()
    history = t.fit(DATA, 9, 16, eval_every=3, validation=HELD_OUT, patience=2, learning_rate=rate,
                    checkpoint=tmp_path / "run.ckpt")  # fmt: skip
    assert history["step"][-1] == 12 and history.restored == 1
    assert "val_loss did not improve for 2 evaluations: restored the weights of step 6" in capsys.readouterr().err
    best = Trainer.resume(handmade.classifier(), tmp_path / "run.best.ckpt", device="cpu")
    assert best.progress.steps == 6
    for name, value in best.state_dict().items():
        np.testing.assert_array_equal(value, t.state_dict()[name])


def test_a_keeper_keeps_the_best_evaluation(tmp_path: Path) -> None:
    keeper = gg.CheckpointKeeper(tmp_path / "kept", keep=2)
    history = fit(trainer(), epochs=2, callbacks=[keeper])
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == [
        "best.ckpt", "step-00000012.ckpt", "step-00000014.ckpt",
    ]  # fmt: skip
    best = Trainer.resume(handmade.classifier(), keeper.best, device="cpu").progress.steps
    assert best == history["step"][int(np.argmin(history["val_loss"]))]


@pytest.mark.parametrize("wrong", [{"rowed": 99}, {"eval_every": 0}, {"eval_every": -1}, {"rowed": 0}])
def test_a_record_that_contradicts_itself_is_refused(wrong: dict[str, int]) -> None:
    t = trainer()
    fit(t, max_steps=6, epochs=9)
    body = json.loads(body_of(t.progress))
    assert (body["rowed"], body["eval_every"], body["batch"]) == (6, 3, 6)
    from_text(json.dumps({**body, "digest": ""}))
    with pytest.raises(ValueError, match=r"rowed|eval_every|sums"):
        from_text(json.dumps({**body, **wrong, "digest": ""}))


def test_it_needs_held_out_data() -> None:
    with pytest.raises(DataError, match="pass validation"):
        trainer().fit(DATA, eval_every=3, progress=False)
    with pytest.raises(DataError, match="eval_every"):
        fit(trainer(), eval_every=0)


@pytest.mark.sweep(0)
def test_in_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(), "model.onnx")
    np.savez("train.npz", **arrays(96))
    words = ["train", "model.onnx", "--data", "train.npz", "--epochs", "2", "--run", "one", "--eval-every", "2"]
    assert run(words) == 1 and "add --validation" in capsys.readouterr().err
    assert run([*words, "--validation", "train.npz", "--patience", "3", "--force"]) == 0
    assert len(Path("one/history.csv").read_text().splitlines()) == 1 + 3  # 6 steps
    assert run(["train", "one", "--resume", "--epochs", "3"]) == 0
    assert len(Path("one/history.csv").read_text().splitlines()) == 1 + 5  # and one at the end
    capsys.readouterr()

"""Checkpoints: bit-exact resuming, and nothing damaged or foreign gets in."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.errors import ArgumentError, CheckpointError, DataError, OutputError
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.saved.checkpoint import CheckpointKeeper, checkpoint_pieces
from gradgraph.runtime.trainer import Trainer
from tests.kit import handmade

QUIET = RuntimeOptions(threads=1)
STEP = handmade.classifier()
DATA = handmade.points(75)


def trainer(**options: object) -> Trainer:
    return Trainer(STEP, device="cpu", options=QUIET, **options)  # type: ignore[arg-type]


def resumed(path: Path) -> Trainer:
    return Trainer.resume(STEP, path, device="cpu", options=QUIET)


def image(t: Trainer) -> bytes:
    """Everything that a checkpoint would hold."""
    return b"".join(checkpoint_pieces(t.state_dict(), t.progress))


FIT: dict[str, Any] = {"epochs": 4, "batch_size": 16, "progress": False, "validation": handmade.points(20, seed=4)}


@pytest.mark.sweep(0.57)
@pytest.mark.parametrize("done", [1, 3, 5, 7, 10, 14])
def test_resume_is_bit_exact(done: int, tmp_path: Path) -> None:
    """Twenty steps in one go, or some of them (an epoch has five), a checkpoint, and the rest."""
    whole = trainer(seed=3)
    whole.fit(DATA, **FIT)
    part = trainer(seed=3)
    part.fit(DATA, max_steps=done, **FIT)
    assert part.progress.steps == done
    part.save(tmp_path / "a.ckpt")
    rest = resumed(tmp_path / "a.ckpt")
    assert image(rest) == image(part)
    history = rest.fit(DATA, **FIT)
    assert rest.progress.steps == 20
    assert image(rest) == image(whole)
    assert history == whole.history
    assert history.to_csv() == whole.history.to_csv()  # the columns in the same order, too


def test_resume_with_dropout_and_adam(tmp_path: Path) -> None:
    """Masks are drawn from a counter that is state, so a resumed run draws the same ones."""
    graph = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 4] x) => (float[batch, 3] logits) <float ratio = {0.5}, float[4, 3] w> {
        d = Dropout (x, ratio)
        logits = MatMul (d, w)
    }""")
    graph.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    step = gg.build(graph, "cross_entropy", gg.optim.adam(0.01))
    data = {name: DATA[name] for name in ("x", "target")}
    whole, part = (Trainer(step, device="cpu", options=QUIET) for _ in range(2))
    whole.fit(data, **{**FIT, "validation": None})
    part.fit(data, max_steps=8, **{**FIT, "validation": None})
    part.save(tmp_path / "a.ckpt")
    rest = Trainer.resume(step, tmp_path / "a.ckpt", device="cpu", options=QUIET)
    rest.fit(data, **{**FIT, "validation": None})
    assert image(rest) == image(whole)
    first, again = (Trainer(step, device="cpu", options=QUIET) for _ in range(2))
    losses = [[float(t.step(data)["loss"]) for _ in range(3)] for t in (first, again)]
    assert losses[0] == losses[1]


def test_manual_loop_resumes_too(tmp_path: Path) -> None:
    whole, part = trainer(), trainer()
    for i in range(10):
        whole.step(handmade.points(8, seed=i))
    for i in range(5):
        part.step(handmade.points(8, seed=i))
    part.save(tmp_path / "a.ckpt")
    rest = resumed(tmp_path / "a.ckpt")
    for i in range(5, 10):
        rest.step(handmade.points(8, seed=i))
    whole.save(tmp_path / "whole")
    rest.save(tmp_path / "rest")
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "rest").read_bytes()


def test_streams_resume_by_skipping(tmp_path: Path) -> None:
    batches = [handmade.points(8, seed=i) for i in range(6)]
    whole, part = trainer(), trainer()
    whole.fit(lambda: iter(batches), epochs=2, progress=False)
    part.fit(batches, epochs=2, max_steps=4, progress=False)
    part.save(tmp_path / "a.ckpt")
    rest = resumed(tmp_path / "a.ckpt")
    rest.fit(batches, epochs=2, progress=False)
    assert np.array_equal(rest.state_dict()["w1"], whole.state_dict()["w1"])


def test_fit_checkpoints_each_epoch_and_a_finished_run_has_nothing_left(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    steps: list[int] = []

    class Watch:
        def on_step(self, t: Trainer, results: object) -> None:
            if path.exists():
                steps.append(resumed(path).progress.steps)

    t = trainer()
    t.fit(DATA, checkpoint=path, callbacks=[Watch()], **FIT)
    assert sorted(set(steps)) == [5, 10, 15]
    again = resumed(path)
    assert again.fit(DATA, **FIT) == t.history
    assert again.progress.steps == 20
    assert again.fit(DATA, **FIT)["step"][-1] == 40  # a second fit on the same trainer is a new one


def test_checkpoint_every(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    t = trainer()
    t.fit(DATA, checkpoint=path, checkpoint_every=4, **{**FIT, "epochs": 1})
    assert resumed(path).progress == t.progress


def test_a_new_fit_after_an_unfinished_one_starts_an_epoch(tmp_path: Path) -> None:
    t = trainer()
    t.fit(DATA, max_steps=2, **FIT)
    t.fit(DATA, **{**FIT, "batch_size": 25})
    assert t.progress.steps == 2 + 4 * 3
    assert t.progress.epoch == 1 + 4


def test_resuming_in_the_middle_needs_the_same_batches(tmp_path: Path) -> None:
    t = trainer()
    t.fit(DATA, max_steps=2, **FIT)
    t.save(tmp_path / "a.ckpt")
    with pytest.raises(
        DataError,
        match=r"batch_size is 20, but the run was stopped .* with 16; fit with batch_size=16 to finish",
    ):
        resumed(tmp_path / "a.ckpt").fit(DATA, **{**FIT, "batch_size": 20})
    other = resumed(tmp_path / "a.ckpt")
    other.fit(DATA, resume=False, **{**FIT, "batch_size": 20})
    assert other.progress.steps == 2 + 4 * 4


def test_failed_saves_do_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    t = trainer()

    class Vanish:
        """The folder is gone during the second epoch, and back for the last."""

        def on_epoch(self, t: Trainer, row: dict[str, float]) -> None:
            if row["epoch"] == 2:
                folder.rename(tmp_path / "away")
            if row["epoch"] == 4:
                (tmp_path / "away").rename(folder)

    t.fit(DATA, checkpoint=folder / "run.ckpt", callbacks=[Vanish()], **FIT)
    assert resumed(folder / "run.ckpt").progress.steps == 20
    assert sum("training continues" in r.getMessage() for r in caplog.records) == 2
    with pytest.raises(OutputError):
        t.fit(DATA, checkpoint=tmp_path / "nowhere" / "run.ckpt", **FIT)


def test_keeper_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    t = trainer()
    keeper = CheckpointKeeper(tmp_path / "kept", keep=2, monitor="val_accuracy", mode="max")
    history = t.fit(DATA, callbacks=[keeper], **{**FIT, "epochs": 5})
    assert sorted(p.name for p in keeper.folder.iterdir()) == ["best.ckpt", "step-00000020.ckpt", "step-00000025.ckpt"]
    best = int(np.argmax(history["val_accuracy"]))
    assert resumed(keeper.best).progress.steps == history["step"][best]
    with pytest.raises(CheckpointError, match="no column 'val_auc'"):
        t.fit(DATA, callbacks=[CheckpointKeeper(tmp_path, monitor="val_auc")], **FIT)


def test_the_best_one_of_a_keeper_stays_after_a_resume(tmp_path: Path) -> None:
    """In a new process, a new keeper; the epochs from there on are worse."""
    rates: dict[str, Any] = {"learning_rate": lambda step: 0.1 if step < 10 else 5.0}
    options = {**FIT, **rates, "epochs": 5}
    history = trainer().fit(DATA, callbacks=[CheckpointKeeper(tmp_path / "whole")], **options)
    trainer().fit(DATA, callbacks=[CheckpointKeeper(tmp_path / "kept")], max_steps=15, **options)
    rest = resumed(tmp_path / "kept")
    assert rest.fit(DATA, callbacks=[CheckpointKeeper(tmp_path / "kept")], **options) == history
    for name in ("best.ckpt", "step-00000025.ckpt"):
        assert (tmp_path / "kept" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert resumed(tmp_path / "kept" / "best.ckpt").progress.steps < 15


def test_a_keeper_in_the_folder_of_another_run_keeps_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer().fit(DATA, callbacks=[CheckpointKeeper(tmp_path, keep=2)], **{**FIT, "epochs": 5})
    assert "later steps" not in caplog.text
    history = trainer().fit(DATA, callbacks=[CheckpointKeeper(tmp_path, keep=2)], learning_rate=1e-3, **FIT)
    last = FIT["epochs"] * 5
    assert (tmp_path / f"step-{last:08d}.ckpt").is_file() and (tmp_path / "step-00000025.ckpt").is_file()
    assert "contains checkpoints of later steps (step-00000025.ckpt), from another run" in caplog.text
    assert resumed(tmp_path / "best.ckpt").history["val_loss"][-1] == min(history["val_loss"])


@pytest.mark.parametrize("given", [{"keep": 0}, {"keep": -1}, {"keep": None}, {"mode": "Max"}, {"monitor": 3}])
def test_a_keeper_that_would_keep_nothing_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(given))} is"):
        CheckpointKeeper(tmp_path, **given)


# --- damage ---------------------------------------------------------------------------------------------------


def edit_header(path: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def edit_record(path: Path, **changes: object) -> None:
    def change(header: dict) -> None:  # type: ignore[type-arg]
        record = {**json.loads(header["__metadata__"]["gradgraph"]), **changes}
        header["__metadata__"]["gradgraph"] = json.dumps(record)

    edit_header(path, change)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda p: p.unlink(), "cannot read"),
    "folder": (lambda p: (p.unlink(), p.mkdir()), "is a folder without checkpoints"),
    "fifo": (lambda p: (p.unlink(), os.mkfifo(p)), "not a regular file"),
    "empty": (lambda p: os.truncate(p, 0), "is damaged"),
    "text": (lambda p: p.write_text("not a checkpoint at all"), "is damaged"),
    "truncated": (lambda p: os.truncate(p, p.stat().st_size - 9), "is damaged"),
    "header length": (lambda p: p.write_bytes(b"\xff" * 8 + p.read_bytes()[8:]), "is damaged"),
    "no record": (lambda p: edit_header(p, lambda h: h["__metadata__"].clear()), "not a gradgraph checkpoint"),
    "newer": (lambda p: edit_record(p, version=3), "has version 3, but this gradgraph reads up to 2"),
    "odd version": (lambda p: edit_record(p, version="x"), "is damaged"),
    "unknown field": (lambda p: edit_record(p, library="evil.so"), "is damaged"),
    "negative steps": (lambda p: edit_record(p, steps=-1), "steps is -1"),
    "text steps": (lambda p: edit_record(p, steps="many"), "is damaged"),
    "history": (lambda p: edit_record(p, history={"a": [1], "b": []}), "different lengths"),
    "sums": (lambda p: edit_record(p, sums=[1, 2]), "is damaged"),
    "lacks a tensor": (lambda p: edit_header(p, lambda h: h.update(w9=h.pop("w1"))), "'w9', which this step does not"),
    "other shape": (lambda p: edit_header(p, lambda h: h["w1"].update(shape=[8, 4])), "float32[8, 4] in the state"),
    "other dtype": (lambda p: edit_header(p, lambda h: h["w1"].update(dtype="I32")), "int32[4, 8] in the state"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoints_are_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    trainer().save(path)
    how, says = DAMAGE[damage]
    how(path)
    t = trainer()
    before = image(t)
    with pytest.raises(CheckpointError, match=re.escape(says)) as caught:
        t.load(path)
    assert "\n" not in str(caught.value)
    assert image(t) == before


def test_checkpoint_of_another_step(tmp_path: Path) -> None:
    trainer().save(tmp_path / "run.ckpt")
    with pytest.raises(CheckpointError, match="which this step does not have"):
        Trainer.resume(handmade.regression(), tmp_path / "run.ckpt", device="cpu")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({}, ""),
        ({"batch_size": 20}, "batch_size 20 (was 16)"),
        ({"batch_size": 20, "shuffle": False}, "batch_size 20 (was 16), shuffle False (was True)"),
        ({"drop_last": True}, "drop_last True (was False)"),
    ],
)
def test_a_run_that_goes_on_with_other_batches_says_so(
    other: dict[str, Any], says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    t = trainer()
    t.fit(DATA, **{**FIT, "epochs": 1})
    t.save(tmp_path / "a.ckpt")
    caplog.clear()
    resumed(tmp_path / "a.ckpt").fit(DATA, **{**FIT, "epochs": 2, **other})
    told = [message for message in caplog.messages if "continues with" in message]
    assert len(told) == bool(says) and all(says in message for message in told)

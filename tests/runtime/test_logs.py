"""Logs while a run goes on: what they hold, after a resume too, and that training does not depend on them."""

from __future__ import annotations

import csv
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.errors import ArgumentError, OutputError, RuntimeUnavailableError
from gradgraph.frontend import export, nn
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.loop.logs import Csv, JsonLines
from gradgraph.runtime.trainer import Trainer
from tests.kit import handmade

QUIET = RuntimeOptions(threads=1)
DATA, HELD_OUT = handmade.points(48), handmade.points(40, seed=5)


def trainer() -> Trainer:
    return Trainer(handmade.classifier(), device="cpu", options=QUIET)


def fit(t: Trainer, **options: Any) -> Any:
    return t.fit(DATA, batch_size=16, validation=HELD_OUT, progress=False, **options)


def records(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return list(csv.DictReader(path.read_text().splitlines()))


def places(path: Path) -> list[tuple[str, int]]:
    return [(r["event"], int(r["step"])) for r in records(path)]


EVERY_STEP = [("step", 1), ("step", 2), ("step", 3), ("epoch", 3), ("step", 4), ("step", 5), ("step", 6), ("epoch", 6)]


@pytest.mark.parametrize("name", ["m.jsonl", "m.csv"])
def test_steps_and_epochs(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    history = fit(trainer(), epochs=2, log=path, log_every=1, learning_rate=lambda step: 0.1 * 0.5**step)
    assert places(path) == EVERY_STEP
    first, last = records(path)[0], records(path)[-1]
    assert {"loss", "accuracy", "samples_per_second", "seconds", "epoch"} <= first.keys()
    assert float(records(path)[2]["learning_rate"]) == pytest.approx(0.025)
    assert float(last["val_loss"]) == history["val_loss"][-1]
    if sys.platform == "linux":
        assert 10 < float(first["memory_mib"]) < 1e5


def test_every(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    fit(trainer(), epochs=2, log=[path], log_every=4)
    assert places(path) == [("epoch", 3), ("step", 4), ("epoch", 6)]


@pytest.mark.parametrize("name", ["m.jsonl", "m.csv"])
def test_a_resumed_run_has_each_record_once(tmp_path: Path, name: str) -> None:
    """It goes back to its checkpoint, and so does the log; another run begins anew."""
    path, checkpoint = tmp_path / name, tmp_path / "run.ckpt"
    options: dict[str, Any] = {"epochs": 2, "log": path, "log_every": 1, "checkpoint": checkpoint}
    t = trainer()
    fit(t, max_steps=2, **options)
    t.step({name: array[:16] for name, array in DATA.items()})
    with path.open("a") as file:
        file.write(path.read_text().splitlines()[-1].replace("2", "5") + "\n")  # of steps after the checkpoint
    fit(Trainer.resume(handmade.classifier(), checkpoint, device="cpu", options=QUIET), **options)
    assert places(path) == EVERY_STEP
    fit(trainer(), epochs=1, log=path, log_every=3)
    assert places(path) == [("step", 3), ("epoch", 3)]


def test_training_is_the_same_with_a_log(tmp_path: Path) -> None:
    with_log, without = trainer(), trainer()
    assert fit(with_log, epochs=2, log=tmp_path / "m.jsonl", log_every=1) == fit(without, epochs=2)


def test_an_object_of_the_users(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[dict[str, Any]] = []
    writer = types.SimpleNamespace(write=seen.append)
    fit(trainer(), log=writer, log_every=1)
    assert [r["event"] for r in seen] == ["step", "step", "step", "epoch"]

    def full(record: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    t = trainer()
    fit(t, log=types.SimpleNamespace(write=full), log_every=1)
    assert t.progress.steps == 3
    assert [r.levelname for r in caplog.records if "training continues" in r.message] == ["ERROR"]


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t = trainer()
    with pytest.raises(OutputError, match=r"should end in \.jsonl or \.csv"):
        fit(t, log=tmp_path / "m.txt")
    with pytest.raises(OutputError):
        fit(t, log=tmp_path / "missing" / "m.jsonl")
    with pytest.raises(ArgumentError, match="log is 3"):
        fit(t, log=3)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(RuntimeUnavailableError, match=r"pip install tensorboardX"):
        fit(t, log=tmp_path / "runs")
    assert t.progress.steps == 0


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for tensorboardX, an extra."""
    seen: list[Any] = []

    class Events:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            seen.append((folder, purge_step))

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            seen.append((tag, step))

        def flush(self) -> None: ...

        def close(self) -> None:
            seen.append("closed")

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Events))
    t, folder = trainer(), tmp_path / "runs"
    fit(t, log=folder, log_every=3)
    assert seen[0] == (str(folder), None)
    assert {("train/loss", 3), ("train/samples_per_second", 3), ("epoch/loss", 3), ("val/accuracy", 3)} <= set(seen)
    assert seen[-1] == "closed"
    fit(t, log=folder)
    assert (str(folder), 4) in seen


@pytest.mark.parametrize(("kind", "name"), [(JsonLines, "m.jsonl"), (Csv, "m.csv")])
def test_a_file_of_something_else_is_replaced(tmp_path: Path, kind: Any, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xff\xfe{]\n1,2\n")
    writer = kind(path)
    writer.begin(7)
    writer.write({"event": "step", "step": 8, "loss": float("nan")})
    writer.close()
    assert places(path) == [("step", 8)]


RATE = gg.optim.warmup(2, gg.optim.cosine(0.1, 6))
RATES = [0.1 * (s / 2 if s < 2 else 0.5 * (1 + math.cos(math.pi * (s - 2) / 6))) for s in range(6)]


def fit_scheduled(log: Path) -> None:
    step = gg.build(export(nn.Linear(2, 3), {"x": ("batch", 2)}), optimizer=gg.optim.adamw(RATE))
    data = {"x": np.eye(48, 2, dtype=np.float32), "target": np.arange(48) % 3}
    Trainer(step, device="cpu", options=QUIET).fit(data, 2, 16, log=log, log_every=1, progress=False)


@pytest.mark.parametrize("name", ["m.jsonl", "m.csv"])
def test_the_rate_of_a_schedule_in_the_graph_stands_in_every_record(tmp_path: Path, name: str) -> None:
    fit_scheduled(tmp_path / name)
    steps = [float(r["learning_rate"]) for r in records(tmp_path / name) if r["event"] == "step"]
    epochs = [float(r["learning_rate"]) for r in records(tmp_path / name) if r["event"] == "epoch"]
    np.testing.assert_allclose(steps, RATES, atol=1e-7)
    np.testing.assert_allclose(epochs, [RATES[2], RATES[5]], atol=1e-7)


def test_the_rate_of_a_schedule_in_the_graph_stands_in_events_for_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="it writes the events")
    from tensorboardX.proto.event_pb2 import Event

    fit_scheduled(tmp_path / "events")
    (path,) = (tmp_path / "events").iterdir()
    data, rates = path.read_bytes(), dict[int, float]()
    while data:  # length, its checksum, an event, its checksum
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        for value in event.summary.value:
            if value.tag == "train/learning_rate":
                rates[event.step] = value.simple_value
        data = data[16 + size :]
    np.testing.assert_allclose([rates[step] for step in range(1, 7)], RATES, atol=1e-7)

"""One trainer in several threads: no step is lost, no batch mixed with another, and a fit is not disturbed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradgraph.data.sources import sources as data_module
from gradgraph.errors import BusyError, GradgraphError
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.saved.checkpoint import load_checkpoint
from gradgraph.runtime.trainer import Trainer
from tests.kit import handmade

QUIET = RuntimeOptions(threads=1)
STEP = handmade.classifier()
DATA = handmade.points(64)


def trainer() -> Trainer:
    return Trainer(STEP, device="cpu", options=QUIET)


def in_threads(*calls: Callable[[], object]) -> list[BaseException]:
    """Run all at once; what they raised."""
    raised: list[BaseException] = []
    ready = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        ready.wait()
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return raised


def test_no_step_is_lost() -> None:
    """Every step adds to a counter that is state, so a lost one is seen."""
    shared, alone = trainer(), trainer()
    batch = {name: column[:16] for name, column in DATA.items()}

    def fifty() -> None:
        for _ in range(50):
            shared.step(batch)

    assert not in_threads(*[fifty] * 4)
    for _ in range(200):
        alone.step(batch)
    assert shared.progress.steps == 200
    assert all(np.array_equal(value, shared.state_dict()[name]) for name, value in alone.state_dict().items())


def test_a_new_trainer_makes_its_sessions_once() -> None:
    """All threads ask for the state before there is one."""
    for _ in range(3):
        t, seen = trainer(), []
        assert not in_threads(*[lambda t=t, seen=seen: seen.append(t.state)] * 4)
        assert len({id(state) for state in seen}) == 1


READS: dict[str, Callable[[Trainer, Any, Path], object]] = {
    "evaluate": lambda t, prepared, path: t.evaluate(prepared),
    "evaluate other data": lambda t, prepared, path: t.evaluate(DATA, 16),
    "predict": lambda t, prepared, path: t.predict(DATA, 16),
    "parameters": lambda t, prepared, path: t.parameters,
    "state_dict": lambda t, prepared, path: t.state_dict(),
    "save": lambda t, prepared, path: (t.save(path / "a.ckpt"), load_checkpoint(path / "a.ckpt", STEP.manifest.state)),
    "export": lambda t, prepared, path: t.export(path / "a.onnx"),
    "prepare": lambda t, prepared, path: t.prepare(DATA, 16),
}


@pytest.mark.sweep(0.38)
@pytest.mark.parametrize("gathers_ahead", [False, True])
def test_reading_beside_a_fit_changes_nothing(
    gathers_ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read gets its turn while the fit runs, also over the very data that are trained on."""
    if gathers_ahead:
        monkeypatch.setattr(data_module, "PREFETCH_BYTES", 0)
    options: dict[str, Any] = {"epochs": 40, "batch_size": 16, "progress": False}
    alone, shared = trainer(), trainer()
    history = alone.fit(DATA, **options)
    prepared = shared.prepare(DATA, 16)
    done, reads = threading.Event(), dict.fromkeys(READS, 0)

    class Wait:
        """The fit goes on for as long as a read has not had its turn."""

        def on_step(self, t: Trainer, results: object) -> None:
            if t.progress.steps == 20:
                t.evaluate(prepared)  # over the same columns, between two batches
            if t.progress.steps > 100 and not all(reads.values()):
                time.sleep(0.01)

    def fit() -> None:
        try:
            assert shared.fit(prepared, callbacks=[Wait()], **options) == history
        finally:
            done.set()

    def read() -> None:
        while not done.is_set():
            for name, call in READS.items():
                call(shared, prepared, tmp_path)
                reads[name] += not done.is_set()

    raised = in_threads(fit, read)
    assert not raised, raised
    assert all(reads.values()), reads
    assert all(np.array_equal(value, shared.state_dict()[name]) for name, value in alone.state_dict().items())


CHANGES: dict[str, Callable[[Trainer, Path], object]] = {
    "step": lambda t, path: t.step(DATA),
    "fit": lambda t, path: t.fit(DATA, progress=False),
    "load": lambda t, path: t.load(path),
    "load_state_dict": lambda t, path: t.load_state_dict(trainer().state_dict()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changes_beside_a_fit_are_refused(what: str, tmp_path: Path) -> None:
    alone, shared = trainer(), trainer()
    path = tmp_path / "other.ckpt"
    trainer().save(path)
    refused: list[BaseException] = []

    class Disturb:
        def on_step(self, t: Trainer, results: object) -> None:
            if t.progress.steps == 3:
                refused.extend(in_threads(lambda: CHANGES[what](shared, path)))

    options: dict[str, Any] = {"epochs": 3, "batch_size": 16, "progress": False}
    history = alone.fit(DATA, **options)
    assert shared.fit(DATA, callbacks=[Disturb()], **options) == history
    assert [type(error) for error in refused] == [BusyError]
    assert f"{what} cannot run while fit trains the same trainer in the thread 'MainThread'" in str(refused[0])
    CHANGES[what](shared, path)  # afterwards nothing is in its way


def test_a_waiting_thread_has_its_turn_soon() -> None:
    """A lock goes to whoever asks first, and that would be the fit again and again."""
    t = trainer()
    stop = threading.Event()

    class Stop:
        def on_step(self, t: Trainer, results: object) -> bool:
            return stop.is_set()

    waits: list[float] = []

    def read() -> None:
        while t.progress.steps < 10:
            time.sleep(0.001)
        for _ in range(20):
            began = time.monotonic()
            t.state_dict()
            waits.append(time.monotonic() - began)
        stop.set()

    fit: Callable[[], object] = lambda: t.fit(  # noqa: E731
        DATA, epochs=10**6, batch_size=16, progress=False, callbacks=[Stop()]
    )
    assert not [e for e in in_threads(fit, read) if isinstance(e, GradgraphError)]
    assert sorted(waits)[10] < 1.0

"""The training session is made for the usual shape of a batch, and a second one serves all others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from gradgraph.data.record.specs import TensorSpec
from gradgraph.runtime.execution.binding import STAGED_BYTES, BoundSession
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.execution.shaped import ShapedSessions
from gradgraph.runtime.trainer import Trainer
from tests.kit import handmade

QUIET = RuntimeOptions(threads=1)


def trainer(features: int | None = None) -> Trainer:
    step = handmade.classifier() if features is None else handmade.regression(features)
    return Trainer(step, device="cpu", options=QUIET)


def made_for(t: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """The sizes for which training sessions are made from now on."""
    made: list[dict[str, int]] = []
    original = t._session.part._make

    def recorded(sizes: dict[str, int]) -> BoundSession:
        made.append(sizes)
        return original(sizes)

    monkeypatch.setattr(t._session.part, "_make", recorded)
    return made


def test_one_session_for_the_usual_shape_and_one_for_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    t, other = trainer(), trainer()
    made = made_for(t, monkeypatch)
    for n in (8, 8, 5, 8, 3, 5, 8):
        batch = handmade.points(n, seed=n)
        assert t.step(batch)["loss"] == pytest.approx(other.step(batch)["loss"], rel=1e-6)
    assert made == [{"batch": 8}, {}]
    inputs = {i.name: i.shape for i in t._session.part.of(handmade.points(8)).session.get_inputs()}
    assert inputs["x"] == [8, handmade.FEATURES]


@pytest.mark.parametrize(("rows", "batch_size", "expected"), [(40, 16, 16), (10, 16, 10), (32, 16, 16)])
def test_fit_knows_the_usual_shape(rows: int, batch_size: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    t = trainer()
    made = made_for(t, monkeypatch)
    t.step(handmade.points(1))  # somebody tried it out
    t.fit(handmade.points(rows), batch_size=batch_size, epochs=2, progress=False)
    assert made[:2] == [{"batch": 1}, {"batch": expected}]
    assert made[2:] == ([{}] if rows % batch_size and rows > batch_size else [])


def test_a_resumed_run_uses_the_session_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it could round differently: the first batch after the resume may have any shape."""
    t = trainer()
    t.step(handmade.points(8))
    t.save(tmp_path / "run.ckpt")
    again = Trainer.resume(handmade.classifier(), tmp_path / "run.ckpt", device="cpu", options=QUIET)
    made = made_for(again, monkeypatch)
    again.step(handmade.points(5))
    again.step(handmade.points(8))
    assert made == [{}, {"batch": 8}]


def test_a_model_with_fixed_shapes_has_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    t = Trainer(handmade.regression(batch=8), device="cpu", options=QUIET)
    made = made_for(t, monkeypatch)
    x = np.ones((8, 3), np.float32)
    for _ in range(3):
        t.step({"x": x, "t": x[:, :1]})
    assert made == [{}]


def test_shapes_are_told_apart_by_name_not_by_place() -> None:
    """A batch may give its parts in any order."""
    specs = [TensorSpec("a", "float32", ("n",)), TensorSpec("b", "float32", ("m",))]
    sessions = ShapedSessions(specs, dict)  # type: ignore[arg-type]
    short, long = np.zeros(2, np.float32), np.zeros(3, np.float32)
    assert sessions.of({"a": short, "b": long}) == {"n": 2, "m": 3}
    assert sessions.of({"b": short, "a": long}) == {}
    assert sessions.of({"b": ort.OrtValue.ortvalue_from_numpy(long), "a": short}) == {"n": 2, "m": 3}


@pytest.mark.parametrize("features", [3, STAGED_BYTES // 16])
def test_a_batch_is_read_wherever_it_lies(features: int) -> None:
    """Small batches are copied, large or repeated ones bound: every way gives what fresh copies give."""
    t, other = trainer(features), trainer(features)
    random = np.random.default_rng(0)

    def batch(n: int) -> dict[str, np.ndarray]:
        x = (random.normal(size=(n, features)) / features).astype(np.float32)
        return {"x": x, "t": x.sum(1, keepdims=True)}

    a, b, small = batch(8), batch(8), batch(4)
    ready = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in b.items()}
    order = [a, b, a, a, a, b, b, b, b, small, a, ready, ready, b, small, small, small, a, b]
    for i, given in enumerate(order):
        if given is a:
            a["x"] *= np.float32(0.9)  # a buffer that is filled again
        fresh = {name: np.array(v.numpy() if isinstance(v, ort.OrtValue) else v) for name, v in given.items()}
        assert t.step(given)["loss"] == other.step(fresh)["loss"], i

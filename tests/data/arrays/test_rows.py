"""Batches that the session gathers itself: the same bits as gathered beforehand, and only where that is safe."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradgraph.data.shuffling import permutation
from gradgraph.errors import DataError, DivergedError
from gradgraph.runtime.execution.gathering import GatheringSession
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.trainer import Trainer
from tests.kit import handmade

QUIET = RuntimeOptions(threads=2)
Arrays = dict[str, np.ndarray]


def trainer(**options: Any) -> Trainer:
    return Trainer(handmade.classifier(), device="cpu", options=QUIET, seed=5, **options)


def gathers(t: Trainer) -> bool:
    """Does the usual training session gather?"""
    bound = t._session.part.for_usual()
    names = {i.name for i in bound.session.get_inputs()}
    assert isinstance(bound, GatheringSession) == ("gradgraph.rows" in names) == ("x" not in names)
    return isinstance(bound, GatheringSession)


def by_hand(data: Arrays, epochs: int, batch_size: int, drop_last: bool = False) -> tuple[Trainer, list[float]]:
    """The same training on batches gathered beforehand."""
    t, losses, rows = trainer(), [], len(data["x"])
    for epoch in range(epochs):
        order, means = permutation(5, epoch, rows), []
        for first in range(0, rows, batch_size):
            chosen = order[first : first + batch_size]
            if len(chosen) == batch_size or not drop_last:
                result = t.step({name: array[chosen] for name, array in data.items()})
                means.append((float(result["loss"]), len(chosen)))
        losses.append(sum(m * n for m, n in means) / sum(n for _, n in means))
    return t, losses


def same_state(a: Trainer, b: Trainer) -> bool:
    other = b.state_dict()
    return all(np.array_equal(value, other[name]) for name, value in a.state_dict().items())


@pytest.mark.parametrize(("rows", "drop_last"), [(96, False), (70, False), (70, True)])
def test_the_bits_are_those_of_batches_gathered_beforehand(rows: int, drop_last: bool) -> None:
    data = handmade.points(rows)
    t = trainer()
    history = t.fit(data, epochs=3, batch_size=16, drop_last=drop_last, progress=False)
    other, losses = by_hand(data, 3, 16, drop_last)
    assert gathers(t) and not gathers(other)
    assert same_state(t, other)
    assert history["loss"] == pytest.approx(losses, rel=1e-12)


def test_other_batches_run_in_the_same_session() -> None:
    """One session for fit and step, in either order."""
    data, batch = handmade.points(64), handmade.points(16, seed=3)
    fit_first, step_first = trainer(), trainer()
    fit_first.fit(data, batch_size=16, progress=False)
    fit_first.step(batch)
    fit_first.step(dict(reversed(batch.items())))
    step_first.step(batch)
    assert gathers(fit_first) and not gathers(step_first)
    other, _ = by_hand(data, 1, 16)
    for _ in range(2):
        other.step(batch)
    assert same_state(fit_first, other)
    step_first.fit(data, batch_size=16, progress=False)
    assert not gathers(step_first)
    made = dict(step_first._session.part._made)
    assert list(made) == [True]


class Edit:
    """Changes the data while they are used."""

    def __init__(self, data: Arrays) -> None:
        self.data = data

    def on_step(self, trainer: Trainer, results: Any) -> None:
        assert results["loss"].shape == ()
        self.data["x"] *= np.float32(0.5)


def test_a_change_of_the_data_is_seen_by_the_next_batch() -> None:
    data = handmade.points(64)
    t, other, left = trainer(), trainer(), {n: a.copy() for n, a in data.items()}
    t.fit(data, batch_size=16, progress=False, callbacks=[Edit(data)])
    assert gathers(t)
    for rows in permutation(5, 0, 64).reshape(4, 16):
        other.step({name: array[rows] for name, array in left.items()})
        left["x"] *= np.float32(0.5)
    assert same_state(t, other)


def ignored(data: Arrays, path: Path) -> Arrays:
    return {**data, "target": np.where(np.arange(64) % 5 == 0, -100, data["target"])}


def strided(data: Arrays, path: Path) -> Arrays:
    return {**data, "x": np.asfortranarray(data["x"])}


def on_disk(data: Arrays, path: Path) -> Arrays:
    np.save(path / "x.npy", data["x"])
    return {**data, "x": np.load(path / "x.npy", mmap_mode="r")}


@pytest.mark.parametrize("change", [ignored, strided, on_disk])
def test_batches_that_must_be_looked_at_are_gathered_beforehand(change: Any, tmp_path: Path) -> None:
    step = handmade.classifier(ignore_index=-100)
    data = change(handmade.points(64), tmp_path)
    t = Trainer(step, device="cpu", options=QUIET, seed=5)
    history = t.fit(data, batch_size=16, progress=False)
    assert not gathers(t)
    other, total, count = Trainer(step, device="cpu", options=QUIET), 0.0, 0
    for rows in permutation(5, 0, 64).reshape(4, 16):
        batch = {name: np.ascontiguousarray(array[rows]) for name, array in data.items()}
        labels = int(np.count_nonzero(batch["target"] != -100))
        total, count = total + float(other.step(batch)["loss"]) * labels, count + labels
    assert same_state(t, other)
    assert history["loss"] == pytest.approx([total / count], rel=1e-12)


def test_inputs_that_are_to_be_checked_are() -> None:
    data = handmade.points(64)
    data["x"][40, 1] = np.nan
    with pytest.raises(DataError, match=r"^batch \d of epoch 1: 'x' contains nan at index"):
        trainer(check_inputs=True).fit(data, batch_size=16, progress=False)


def test_wrong_data_are_named_as_ever() -> None:
    data = handmade.points(64)
    with pytest.raises(DataError, match=r"^batch 0 of epoch 1: 'x' has shape \[16, 9\], but the step expects"):
        trainer().fit({**data, "x": np.zeros((64, 9), np.float32)}, batch_size=16, progress=False)


def test_a_batch_that_diverges_is_kept() -> None:
    data = handmade.points(64)
    data["x"][int(permutation(5, 0, 64)[20])] = np.inf
    t = trainer()
    with pytest.raises(DivergedError, match=r"^batch 1 of epoch 1: ") as caught:
        t.fit(data, batch_size=16, progress=False)
    assert gathers(t) and t.progress.steps == 1
    rows = permutation(5, 0, 64)[16:32]
    for name, array in data.items():
        assert np.array_equal(caught.value.batch[name], array[rows])


@pytest.mark.sweep(0)
def test_a_finished_fit_lets_go_of_the_data() -> None:
    t, data = trainer(), handmade.points(64)
    held = [weakref.ref(array) for array in data.values()]
    t.fit(data, epochs=2, batch_size=16, progress=False)
    assert gathers(t)
    del data
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    t.fit(handmade.points(64, seed=1), batch_size=16, progress=False)
    assert t.progress.steps == 12


@pytest.mark.sweep(0)
@pytest.mark.parametrize("what", ["evaluate", "predict", "fit"])
def test_nothing_keeps_data_alive(what: str) -> None:
    t, data = trainer(), handmade.points(64)
    data["x"] = np.repeat(data["x"], 500, 1)[:, : data["x"].shape[1]]  # a view, whose base is what counts
    held = [weakref.ref(array) for array in (*data.values(), data["x"].base)]
    t.fit(data, batch_size=16, shuffle=False, progress=False) if what == "fit" else getattr(t, what)(data)
    del data
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_fixed_sizes_and_in_place_updates() -> None:
    step = handmade.regression(batch=8)
    random = np.random.default_rng(0)
    data = {"x": random.normal(size=(40, 3)).astype(np.float32), "t": random.normal(size=(40, 1)).astype(np.float32)}
    fitted = []
    for in_place in (False, True):
        t = Trainer(step, device="cpu", options=RuntimeOptions(threads=1, in_place=in_place))
        t.fit(data, epochs=3, progress=False)
        assert gathers(t)
        fitted.append(t.parameters["w"])
    assert np.array_equal(*fitted)

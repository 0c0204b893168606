"""Outputs of several batches, put together: wherever their samples lie, and where they have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.errors import DataError
from gradgraph.runtime.execution.joining import Layout, joined, layouts
from tests.kit.joined_outputs import X, model

JOINED = ("rows", "turned", "guessed")


def trainer(*outputs: str) -> gg.Trainer:
    step = gg.build(model("rows", *outputs), loss="mse", output="rows")
    return gg.Trainer(step, device="cpu")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 10])
def test_samples_are_put_together_wherever_they_lie(size: int) -> None:
    runs = trainer("turned", "guessed", "weight")
    whole, found = runs.predict(X, 11), runs.predict(X, size)
    for name in (*JOINED, "weight"):
        np.testing.assert_allclose(found[name], whole[name], rtol=1e-6, err_msg=name)


def test_what_has_no_samples_has_an_entry_for_each_batch() -> None:
    found = trainer("total", "sums").predict(X, 4)
    parts = [X[:4], X[4:8], X[8:]]
    np.testing.assert_allclose(found["total"], [part.sum() for part in parts], rtol=1e-5)
    np.testing.assert_allclose(found["sums"], [part.sum(0) for part in parts], rtol=1e-5, atol=1e-6)
    whole = trainer("total", "sums").predict(X, 11)
    assert whole["total"].shape == () and whole["sums"].shape == (3,)


def test_what_has_no_samples_can_leave_none_out() -> None:
    fixed = model("rows", "total")
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    fixed.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 4
    runs = gg.Trainer(gg.build(fixed, loss="mse", output="rows"), device="cpu")
    assert runs.predict(X[:8])["total"].shape == (2,)
    with pytest.raises(DataError, match="'total' is one value for a batch of 4 samples, but the last batch has only 3"):
        runs.predict(X)


def test_other_shapes_in_each_batch_are_given_batch_by_batch() -> None:
    runs = trainer("some")
    with pytest.raises(
        DataError, match="'some' has different shapes in different batches; predict with per_batch=True"
    ):
        runs.predict(X, 4)
    batches = runs.predict(X, 4, per_batch=True)
    assert [len(b["rows"]) for b in batches] == [4, 4, 3]
    np.testing.assert_array_equal(np.concatenate([b["some"] for b in batches]), X[X > 0])
    alone = trainer().predict(X, 4, per_batch=True)
    assert [b.shape for b in alone] == [(4, 2), (4, 2), (3, 2)]


def test_an_axis_that_only_looks_like_that_of_the_samples() -> None:
    """Two axes have the size of a full batch; the last, smaller one tells which it is."""
    parts = [(np.zeros((4, 4, 2)), 4), (np.ones((4, 3, 2)), 3)]
    assert joined("y", parts, Layout()).shape == (4, 7, 2)
    assert Layout((1,)).axis([(np.zeros((4, 4)), 4)]) == 1
    known = layouts(model("rows", "turned", "guessed", "sums", "weight", "some"), ["x"])
    expected = {"rows": Layout((0,)), "turned": Layout((1,)), "guessed": Layout((1,)), "sums": Layout(()),
                "weight": Layout((), False), "some": Layout((0,))}  # fmt: skip
    assert known == expected
    assert Layout((), False).axis([(np.zeros((4, 4)), 4)]) is None


def test_without_a_batch_there_is_nothing() -> None:
    with pytest.raises(DataError, match="the data are empty: the iterable yields no batch"):
        trainer().predict([])


# --- tables and files with their targets -----------------------------------------------------------------------


def pandas_frame(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]").DataFrame(columns)


class PlainTable(dict):
    """What tables have in common."""

    columns = property(lambda self: list(self))
    shape = property(lambda self: (len(next(iter(self.values()))), len(self)))

    def to_numpy(self) -> np.ndarray:
        return np.column_stack(list(self.values()))


def columns(rows: int = 11) -> dict[str, Any]:
    return {"a": X[:rows, 0], "target": np.arange(rows), "b": X[:rows, 1], "c": X[:rows, 2]}


def classifier() -> gg.Trainer:
    return gg.Trainer(gg.build(model("rows"), loss="cross_entropy"), device="cpu")


@pytest.mark.parametrize("made", [PlainTable, pandas_frame])
def test_a_table_with_targets_is_predicted(made: Callable[[Any], Any]) -> None:
    runs = classifier()
    np.testing.assert_allclose(runs.predict(made(columns()), 4), runs.predict(X), rtol=1e-6)


def test_files_with_targets_are_predicted(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", x=X, target=np.arange(11))
    runs = classifier()
    np.testing.assert_allclose(runs.predict(tmp_path / "all.npz", 4), runs.predict(X), rtol=1e-6)
    frame = pandas_frame(columns())
    frame.to_csv(tmp_path / "all.csv", index=False)
    np.testing.assert_allclose(runs.predict(tmp_path / "all.csv", 4), runs.predict(X), rtol=1e-5)

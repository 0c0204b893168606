"""Random walks from data of each kind to a model in use keep the laws of a plain reference."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from tests.data_walks.random_walk import Walk
from tests.data_walks.walk_kinds import SEEDS, walk_of


@pytest.mark.sweep(0.04)
@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, seeds in SEEDS.items() for seed in seeds])
def test_a_walk_breaks_no_law(kind: str, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for package in ("pandas", "sklearn", "pyarrow", "PIL", *(["tokenizers"] if kind == "texts" else [])):
        pytest.importorskip(package, reason="an extra")
    walk = Walk(seed, tmp_path)
    caplog.set_level(logging.ERROR, logger="gradgraph")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tables that lack a class, of rounds that do not suffice
        walk_of(kind)(walk)
    assert not walk.broken, "\n".join([" · ".join(walk.chosen), *walk.broken])


@pytest.mark.sweep(0.4)
@pytest.mark.parametrize("through", ["python", "shell"])
@pytest.mark.parametrize("kind", ["classes", "quantities"])
def test_nothing_is_learnt_from_validation(kind: str, through: str, tmp_path: Path) -> None:
    """Rows of validation with other numbers, words and gaps change no bit of the weights, slots and preprocessing."""
    pd = pytest.importorskip("pandas", reason="an extra")
    rng = np.random.default_rng(0)

    def frame(rows: int, size: float, words: str) -> Any:
        numbers, letters = rng.normal(size=rows) * size, rng.choice(list(words), rows)
        wanted = np.where(numbers > 0, "yes", "no") if kind == "classes" else numbers * 3
        holes = pd.Series(numbers).mask(rng.random(rows) < 0.2)
        return pd.DataFrame({"a": holes, "b": letters, "c": rng.normal(size=rows) * size, "price": wanted})

    train, *held = frame(40, 1, "pqr"), frame(15, 1, "pqr"), frame(23, 1000, "xyz")
    train.to_csv(tmp_path / "train.csv", index=False)
    found = []
    for i, validation in enumerate(held):
        path = tmp_path / f"held{i}.csv"
        validation.to_csv(path, index=False)
        trainer = _trained(through, tmp_path, train, validation, path, tmp_path / f"run{i}")
        found.append((trainer.state_dict(), trainer.names, trainer.history["loss"], trainer.history["val_loss"]))
    (weights, names, losses, of_first), (others, other_names, other_losses, of_second) = found
    assert weights.keys() == others.keys() and names == other_names and losses == other_losses
    for name, array in weights.items():
        np.testing.assert_array_equal(others[name], array, err_msg=name)
    assert of_first != of_second  # the rows were read


def _trained(through: str, folder: Path, train: Any, validation: Any, path: Path, run: Path) -> gg.Trainer:
    """A trainer after its last epoch."""
    if through == "shell":
        words = ["--model", "mlp", "--data", folder / "train.csv", "--validation", path, "--target", "price"]
        Walk(0, folder).shell("train", *words, "--epochs", 2, "--run", run, "--quiet")
        return gg.Trainer.resume(run, device="cpu")
    plan = gg.preprocess.fit(train, "price")
    trainer = gg.Trainer(gg.build(gg.tables.mlp(plan), gg.tables.loss(plan)), device="cpu")
    trainer.fit(train, 2, validation=validation, progress=False)
    return trainer


def test_a_law_that_is_broken_is_told(tmp_path: Path) -> None:
    walk = Walk(0, tmp_path)
    walk.close("numbers are equal", [1.0, 2.0], [1.0, 2.1])
    walk.same("bits are equal", {"a": [1]}, {"a": [2]})
    walk.refused("nothing goes", lambda: None)
    assert len(walk.broken) == 3

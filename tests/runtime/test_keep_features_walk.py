"""Random networks, options and kinds of data: kept features change no bit of losses and state."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.errors import GradgraphError
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.features import kept_rows
from tests.kit.jittered import Jittered
from tests.runtime.test_keep_features import fitted, network, points


class Pairs:
    """A dataset of pairs."""

    def __init__(self, data: dict[str, np.ndarray]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data["x"])

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return self.data["x"][i], self.data["target"][i]


def stored(data: dict[str, np.ndarray], folder: Path) -> str:
    """Write arrays that stay on disk."""
    for name, array in data.items():
        np.save(folder / f"{name}.npy", array)
    return str(folder)


def data_of(rng: np.random.Generator, rows: int, folder: Path) -> tuple[Any, int | None]:
    """Return random data of one kind, and the number of variants if they are augmented."""
    data, kind = points(rows, int(rng.integers(9))), int(rng.integers(6))
    if kind >= 4:
        return Jittered(data, mixes=kind == 5), int(rng.integers(2, 5))
    return [data, (data["x"], data["target"]), Pairs(data), stored(data, folder)][kind], None


def options_of(rng: np.random.Generator, rows: int) -> dict[str, Any]:
    """Return random arguments of fit; never more epochs than variants."""
    chances: dict[str, Any] = {
        "shuffle": False, "drop_last": True, "limit": 2, "validation": points(9, 1), "accumulate": 2, "max_steps": 5,
        "eval_every": 2, "patience": 1,
    }  # fmt: skip
    given = {name: value for name, value in chances.items() if rng.random() < 0.25}
    if "validation" not in given:
        given.pop("eval_every", None)
        given.pop("patience", None)
    return {**given, "epochs": 2, "batch_size": int(rng.integers(2, rows + 4))}


def step_of(rng: np.random.Generator, seed: int) -> gg.Step:
    model, trained = network(seed, is_frozen=True)
    chances: dict[str, Any] = {"ema": 0.9, "metrics": ["accuracy"], "recompute": "sqrt", "augment": None}
    given = {name: value for name, value in chances.items() if value is not None and rng.random() < 0.3}
    optimizer = str(rng.choice(["sgd", "adam", "adamw", "lion"]))
    return gg.build(model, loss="cross_entropy", optimizer=optimizer, train=trained, accumulate=True, **given)


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("seed", range(100, 160))
def test_random_fits(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gradgraph")
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(6, 30))
    step, (data, variants), options = step_of(rng, seed), data_of(rng, rows, tmp_path), options_of(rng, rows)
    if rng.random() < 0.3:
        monkeypatch.setattr(kept_rows, "free_memory", lambda: 100)
    kept = {"keep_features": True, "feature_variants": variants}
    try:
        other, expected, without = fitted(step, data, False, **options)
    except GradgraphError as error:  # too few rows for a batch: kept features change nothing
        with pytest.raises(type(error)):
            fitted(step, data, True, feature_variants=variants, **options)
        return
    one, state, trainer = fitted(step, data, "auto", feature_variants=variants, **options)
    assert one == other
    assert all(np.array_equal(state[n], expected[n]) for n in expected)
    assert trainer.progress.sizes == without.progress.sizes
    if "computing features" in caplog.text and "max_steps" not in options and "patience" not in options:
        path = tmp_path / "run.ckpt"
        fitted(step, data, checkpoint=path, keep=True, feature_variants=variants, **{**options, "max_steps": 1})
        resumed = gg.Trainer.resume(step, path, device="cpu", options=RuntimeOptions(threads=1))
        resumed.fit(data, learning_rate=0.05, progress=False, resume=True, **kept, **options)
        assert all(np.array_equal(value, expected[n]) for n, value in resumed.state_dict().items())

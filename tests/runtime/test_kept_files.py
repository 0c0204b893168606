"""Files of kept values: those of other data, or damaged ones, are not used; files of others stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.features import kept_rows
from tests.runtime.test_keep_features import fitted, head_only, points

STEP, DATA = head_only(), points(30)


class Pairs:
    """A dataset without files, whose content has no digest."""

    def __init__(self, shift: float) -> None:
        self.x = DATA["x"] + np.float32(shift)

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return self.x[i], DATA["target"][i]


def interrupted(data: Any, path: Path) -> None:
    def stop(trainer: Any, row: Any) -> None:
        raise KeyboardInterrupt

    callback = type("Stop", (), {"on_epoch": staticmethod(stop)})()
    with pytest.raises(KeyboardInterrupt):
        fitted(STEP, data, True, checkpoint=path, checkpoint_every=1, callbacks=[callback])


def resumed(data: Any, path: Path, keep: bool) -> dict[str, Any]:
    trainer = gg.Trainer.resume(STEP, path, device="cpu", options=RuntimeOptions(threads=1))
    trainer.fit(data, 3, 8, learning_rate=0.05, progress=False, keep_features=keep, resume=True)
    return trainer.state_dict()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_rows, "free_memory", lambda: 100)
    return tmp_path / "run.ckpt"


def check_same_as_without(data: Any, path: Path) -> None:
    expected = resumed(data, path, False)
    trainer = gg.Trainer.resume(STEP, path, device="cpu", options=RuntimeOptions(threads=1))
    trainer.fit(data, 3, 8, learning_rate=0.05, progress=False, keep_features=True, resume=True, checkpoint=path)
    assert all(np.array_equal(value, expected[n]) for n, value in trainer.state_dict().items())
    assert not path.with_suffix(".features").exists()


def test_other_samples_of_a_dataset_without_files(path: Path) -> None:
    interrupted(Pairs(0), path)
    check_same_as_without(Pairs(1), path)


@pytest.mark.parametrize("damage", [
    lambda bytes_: bytes_[:-100], lambda bytes_: bytes_[:100] + bytes(50) + bytes_[150:], lambda bytes_: b"",
])  # fmt: skip
def test_damaged_files(path: Path, damage: Callable[[bytes], bytes]) -> None:
    interrupted(DATA, path)
    rows = path.with_suffix(".features") / "training" / "0.rows"
    rows.write_bytes(damage(rows.read_bytes()))
    check_same_as_without(DATA, path)


def test_files_of_others_stay(path: Path) -> None:
    other = path.with_suffix(".features") / "training" / "mine.txt"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    fitted(STEP, DATA, True, checkpoint=path)
    assert [p.name for p in other.parent.iterdir()] == ["mine.txt"]

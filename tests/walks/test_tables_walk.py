"""A table with text and gaps, in the shell: not worse than scikit-learn behind a ColumnTransformer, in fewer lines.

``tables_walk.sh`` is what a user types who has read README and docs/how-to/tables.md.
"""

from __future__ import annotations

import runpy
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradgraph.cli.app import run

pd: Any = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")
datasets: Any = pytest.importorskip("sklearn.datasets", reason="an extra: onnx-gradgraph[sklearn]")

HERE = Path(__file__).parent
FOLDS, TOLERANCE = 3, 0.03


def _diabetes() -> Any:
    """The progress of a disease, a number; sex as a word."""
    frame = datasets.load_diabetes(as_frame=True, scaled=False).frame
    return frame.assign(sex=np.where(frame.sex == frame.sex.min(), "female", "male"))


def _wine() -> Any:
    """The cultivar of a wine, by name; its colour in words."""
    found = datasets.load_wine(as_frame=True)
    colour = np.select([found.frame.color_intensity > 5, found.frame.color_intensity > 3.5], ["deep", "medium"], "pale")
    return found.frame.assign(target=np.array(found.target_names)[found.target], color_intensity=colour)


def _folds(frame: Any, seed: int = 0) -> Iterator[tuple[Any, Any]]:
    rng = np.random.default_rng(seed)
    for column in frame.columns[2:6]:
        frame.loc[rng.random(len(frame)) < 0.1, column] = None
    fold = rng.permutation(len(frame)) % FOLDS
    for i in range(FOLDS):
        yield frame[fold != i], frame[fold == i]


def _score(y: Any, called: Any) -> float:
    """The share that is right, of names; of numbers R²."""
    if y.dtype.kind != "f":
        return float(np.mean(y.to_numpy() == called.to_numpy()))
    return float(1 - np.mean((y.to_numpy() - called.to_numpy()) ** 2) / np.var(y.to_numpy()))


def _lines(script: str) -> list[str]:
    """Those that do something."""
    every = (HERE / script).read_text(encoding="utf-8").splitlines()
    return [line for line in every if line.strip() and not line.startswith(("#", '"""'))]


@pytest.mark.slow
@pytest.mark.parametrize("made", [_diabetes, _wine])
def test_a_table_is_learnt_as_well(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ours, by_hand = [], []
    for i, (train, new) in enumerate(_folds(made())):
        train.to_csv("train.csv", index=False)
        new.drop(columns="target").to_csv("new.csv", index=False)
        for line in _lines("tables_walk.sh"):
            assert run([*shlex.split(line.replace("runs/one", f"runs/{i}"))[1:], "--quiet"]) == 0
        predicted = pd.read_csv("predictions.csv")
        ours.append(_score(new.target, predicted["class" if "class" in predicted else "target"]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rounds that do not suffice
            runpy.run_path(str(HERE / "tables_walk_by_hand.py"))
        by_hand.append(_score(new.target, pd.read_csv("by_hand.csv").target))
    assert np.mean(ours) > np.mean(by_hand) - TOLERANCE, (ours, by_hand)
    assert np.mean(ours) > (0.9 if "class" in predicted else 0.35)


@pytest.mark.parametrize("rival", ["by_hand", "with_keras"])
def test_it_takes_fewer_lines(rival: str) -> None:
    assert len(_lines("tables_walk.sh")) < len(_lines(f"tables_walk_{rival}.py")) / 4

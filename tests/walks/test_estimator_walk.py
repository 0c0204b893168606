"""A user of scikit-learn takes our classifier in place of MLPClassifier: not worse, and fewer lines to one file.

``estimator_walk.py`` is what a user writes who has read README and docs/how-to/scikit-learn.md.
"""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pd: Any = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")
datasets: Any = pytest.importorskip("sklearn.datasets", reason="an extra: onnx-gradgraph[sklearn]")
pytest.importorskip("skl2onnx", reason="an extra: onnx-gradgraph[sklearn-export]")

HERE = Path(__file__).parent
OURS, BY_HAND = "estimator_walk.py", "estimator_walk_by_hand.py"
TOLERANCE = 0.02  # of the area under the ROC curve; folds differ by 0.03


def _diabetes() -> Any:
    """Whether a disease gets worse than usual; sex as a word."""
    frame = datasets.load_diabetes(as_frame=True, scaled=False).frame
    called = np.where(frame.target > frame.target.median(), "worse", "better")
    return frame.assign(sex=np.where(frame.sex == frame.sex.min(), "female", "male"), target=called)


def _cancer() -> Any:
    """Whether a tumour is malignant; its size in words beside thirty numbers."""
    found = datasets.load_breast_cancer(as_frame=True)
    size = np.select([found.frame["mean area"] > 800, found.frame["mean area"] > 500], ["large", "medium"], "small")
    return found.frame.assign(**{"size of it": size, "target": np.array(found.target_names)[found.target]})


def _lines(script: str) -> list[str]:
    """The lines of the export."""
    part = (HERE / script).read_text(encoding="utf-8").partition("# --- export")[2].partition("# --- elsewhere")[0]
    return [line for line in part.splitlines()[1:] if line.strip()]


def _walked(script: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rounds that do not suffice
        return runpy.run_path(str(HERE / script))


@pytest.mark.slow
@pytest.mark.parametrize("made", [_diabetes, _cancer])
def test_a_pipeline_with_our_classifier_is_as_good(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame, rng = made(), np.random.default_rng(0)
    for column in frame.columns[2:6]:
        frame.loc[rng.random(len(frame)) < 0.1, column] = None
    held_out = rng.random(len(frame)) < 0.2
    frame[~held_out].to_csv("train.csv", index=False)
    frame[held_out].drop(columns="target").to_csv("new.csv", index=False)
    by_hand, ours = _walked(BY_HAND), _walked(OURS)
    assert ours["scores"].mean() > by_hand["scores"].mean() - TOLERANCE, (ours["scores"], by_hand["scores"])
    assert np.mean(ours["label"] == frame[held_out].target.to_numpy()) > 0.65
    new = pd.read_csv("new.csv")
    np.testing.assert_array_equal(ours["label"], ours["pipeline"].predict(new))
    np.testing.assert_allclose(ours["probabilities"], ours["pipeline"].predict_proba(new), atol=1e-5)
    print(ours["scores"].mean(), by_hand["scores"].mean())


def test_one_file_takes_fewer_lines() -> None:
    assert len(_lines(OURS)) == 1 < len(_lines(BY_HAND))

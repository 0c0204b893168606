"""Texts from a CSV to predictions in three commands: not worse than by hand in torch, in fewer lines."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="compares with PyTorch")
pytest.importorskip("onnxscript", reason="PyTorch exports with it")
pytest.importorskip("tokenizers", reason="reads texts")
pytest.importorskip("pandas", reason="reads tables")
pytest.importorskip("sklearn", reason="carries some of the texts")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import text_network  # noqa: E402
import text_walk  # noqa: E402
import text_walk_by_hand  # noqa: E402

from gradgraph.cli.app import run  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of PyTorch's exporter
EPOCHS, LEAST = 3, 0.75


def lines(script: str) -> int:
    """Those that say something, but for the module's docstring."""
    text = (HERE / script).read_text(encoding="utf-8").split('"""', 2)[2]
    return sum(bool(line.strip()) for line in text.splitlines())


def test_texts_are_told_apart_as_well_as_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text_network.write(tmp_path)
    by_hand = text_walk_by_hand.accuracy(tmp_path, EPOCHS)
    monkeypatch.chdir(tmp_path)
    printed = []
    for line in text_walk.COMMANDS.format(epochs=EPOCHS).strip().splitlines():
        capsys.readouterr()
        assert run(shlex.split(line)[1:]) == 0
        printed.append(capsys.readouterr().out)
    ours = json.loads(printed[1])["scores"]["accuracy"]
    assert ours > LEAST and ours > by_hand - 0.05, (ours, by_hand)
    with (tmp_path / "predicted.csv").open(newline="") as file:
        found = [row["class"] for row in csv.DictReader(file)]
    _, about = text_walk_by_hand.rows_of(tmp_path / "test.csv")
    assert sum(a == b for a, b in zip(found, about, strict=True)) / len(about) == pytest.approx(ours, abs=1e-6)


def test_it_takes_fewer_lines() -> None:
    assert lines("text_walk.py") < lines("text_walk_by_hand.py") / 5
    written = (HERE / "text_walk_with_transformers.py").read_text("utf-8").partition("# --- what a user writes")[2]
    assert lines("text_walk.py") < sum(bool(line.strip()) for line in written.splitlines()) / 5

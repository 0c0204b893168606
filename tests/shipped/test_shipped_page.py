"""What is tried of models that others ship, without the index: the stages on a model of our own, verdicts, the page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import onnx
import pytest

from gradgraph import frontend
from gradgraph.frontend import nn
from gradgraph.rules import registry
from tests.shipped.judged import SLOPE, judged, kept, reason, verdict
from tests.shipped.one_file import Task, checked, sloped
from tests.shipped.packages import FEW, PACKAGES
from tests.shipped.shipped_page import PAGE, page


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small classifier that says probabilities."""
    frontend.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), nn.Softmax(-1))
    onnx.save(frontend.export(network, {"x": ("rows", 3)}, outputs=["probabilities"]), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.mark.sweep(0)
def test_a_file_is_judged(path: Path) -> None:
    found = judged(path, {"x": {"shape": [6, 3], "scale": 1.0}}, 120)
    assert verdict(found) == "trains" and not reason(found)
    assert found["checked"]["counts"]["right"] >= 4 and found["sloped"]["error"] < 0.01
    assert found["trained"]["loss"].startswith("cross_entropy") and found["taken"]["said"]["web"] == ""
    assert found["described"]["operators"] == ["Gemm", "Softmax", "Tanh"] and found["described"]["weights"] == 68


def test_a_wrong_gradient_is_found_in_both_ways(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = registry.RULES["", "Tanh"]

    def emit(op: Any, *arguments: Any, **attributes: Any) -> list[Any]:
        return [None if g is None else g * 3 for g in right.emit(op, *arguments, **attributes)]

    monkeypatch.setitem(registry.RULES, ("", "Tanh"), dataclasses.replace(right, emit=emit))
    task = Task(path, {})
    assert checked(task)["wrong"] and sloped(task)["error"] > SLOPE


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"trained": {"first": 2.0, "last": 1.0}}, "trains"),
        ({"trained": {"first": 1.0, "last": 1.0}}, "does not learn"),
        ({"trained": {"first": 2.0, "last": 1.0}, "checked": {"wrong": ["w at seed 0: 1 for 2"]}}, "WRONG"),
        ({"trained": {"first": 2.0, "last": 1.0}, "sloped": {"error": 0.5}}, "WRONG"),
        ({"trained": {"first": 2.0, "last": 1.0}, "checked": {"failed": "KeyError: x"}}, "failed"),
        ({"trained": {"refused": "no gradient"}}, "refused"),
        ({"ended": {"failed": "the process ended by SIGFPE"}}, "failed"),
        ({"ended": {"late": "not done in 90 s"}}, "not in time"),
    ],
)
def test_verdicts(found: dict[str, Any], said: str) -> None:
    assert verdict(found) == said


def test_the_page_is_what_was_kept() -> None:
    assert PAGE.read_text("utf-8") == page(kept())


def test_the_table_of_packages() -> None:
    names = [p.name for p in PACKAGES]
    assert names == sorted(set(names)) and len(names) > 32 and set(FEW) <= set(names) and len(FEW) == 5
    known = {f"{p.name} {file}" for p in PACKAGES for file in p.files}
    assert known == kept().keys(), "python -m tests.shipped --write tries them"

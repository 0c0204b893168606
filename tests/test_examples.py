"""The examples run and print a check that agrees."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(("name", "options"), [("hessian_vector", {}), ("gradient_penalty", {"steps": 20})])
def test_the_check_at_its_end_agrees(name: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**options)
    assert "they agree\n" in capsys.readouterr().out


def test_the_penalty_brings_the_length_of_the_gradient_to_one(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "gradient_penalty.py"))["main"](steps=60)
    lengths = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert abs(lengths[-1] - 1) < 0.2 < abs(lengths[0] - 1)

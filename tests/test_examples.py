"""The examples run and print a check that agrees."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(("name", "options"), [("hessian_vector", {}), ("gradient_penalty", {"steps": 20}),
                                               ("heat_equation", {"steps": 400})])  # fmt: skip
def test_the_check_at_its_end_agrees(name: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**options)
    assert "they agree\n" in capsys.readouterr().out


def test_the_penalty_brings_the_length_of_the_gradient_to_one(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "gradient_penalty.py"))["main"](steps=60)
    lengths = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert abs(lengths[-1] - 1) < 0.2 < abs(lengths[0] - 1)


def test_the_tagger_does_better_than_the_commoner_tag(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "bracket_tagger.py"))["main"](epochs=4, count=1200)
    assert capsys.readouterr().out.endswith("it does better\n")


def test_the_autoencoder_does_better_than_the_mean_image(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    runpy.run_path(str(EXAMPLES / "digits_vae.py"))["main"](epochs=40)
    said, verdict, *digits = capsys.readouterr().out.splitlines()
    assert "nats" in said
    assert verdict == "it does better"
    assert len(digits) == 8

"""The examples run and print a check that agrees."""

from __future__ import annotations

import re
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


def test_the_generator_draws_better_than_independent_pixels(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    assert "it does better" in said(capsys, "digits_gan", epochs=16)


def test_the_actor_and_the_critic_learn_to_balance(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "actor_critic", rounds=40).endswith("it learnt to balance\n")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_the_gallery_shows_it(path: Path) -> None:
    """By its name, and by a section that the table at the top leads to; the file says how it is run."""
    assert f"python examples/{path.name}" in path.read_text("utf-8").split('"""')[1]
    gallery = (EXAMPLES.parent / "docs" / "gallery.md").read_text("utf-8")
    section = gallery[: gallery.index(f"(../examples/{path.name})")].rpartition("\n## ")[2].splitlines()[0]
    assert f"(#{section.lower().replace(' ', '-')})" in gallery


def said(capsys: pytest.CaptureFixture[str], name: str, **options: Any) -> str:
    """What an example prints at this size."""
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**options)
    return capsys.readouterr().out


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"\d+\.\d+|\d+(?=%)", text)]


def test_what_is_known_is_carried_over(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    _, frozen, followed = numbers(said(capsys, "transfer_learning", epochs=8, count=300))
    assert frozen < followed


def test_a_gpt_writes_letters_of_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    figures, text = said(capsys, "char_gpt", steps=25, count=30, limit=2).splitlines()
    assert numbers(figures)[0] > 12  # percent of the next characters, of 60 letters
    assert len(text) == len("A step ") + 30


def test_bert_reads_padded_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert numbers(said(capsys, "bert_classifier", epochs=2, count=300))[0] > 50


def test_the_unet_finds_shapes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "unet.png"
    found = numbers(said(capsys, "unet", epochs=2, count=100, picture=str(picture)))
    assert found[2] < 0.65  # the cross entropy; that of a coin is 0.69
    assert picture.stat().st_size > 1000


def test_ctc_spells(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "ctc_speech", epochs=1, count=60).count("heard") == 6


def test_forces_teach_more_than_energies(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "molecule_forces", epochs=60).endswith("forces teach it more\n")


def test_clip_finds_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert "of 48 descriptions" in said(capsys, "clip", epochs=1, count=200)


def test_two_tasks_share_a_trunk(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    digits, _, ink = numbers(said(capsys, "multi_task", epochs=3))
    assert digits > 70 and ink > 0.5

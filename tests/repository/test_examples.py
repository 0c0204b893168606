"""The examples run, print a check that agrees and draw a picture; the gallery shows them all."""

from __future__ import annotations

import importlib.util
import logging
import re
import runpy
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
GALLERY = EXAMPLES.parent / "docs" / "start" / "gallery.md"
PROGRAMS = sorted(path for path in EXAMPLES.glob("*.py") if path.stem != "pictures")
LARGEST_PICTURE = 60_000  # bytes
Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Said:
    """Runs an example at some size; gives what it prints. It draws, too, where matplotlib is."""
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as `python examples/…` has it

    def run(name: str, **options: Any) -> str:
        picture = tmp_path / f"{name}.svg"
        if importlib.util.find_spec("matplotlib"):
            options["plot"] = str(picture)
        level = logging.root.level
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**options)
        assert logging.root.level == level, "it keeps the warnings of whoever runs it quiet"
        if "plot" in options:
            parts = {element.tag.rpartition("}")[2] for element in ET.parse(picture).iter()}
            assert parts & {"path", "image", "text"}, "an empty picture"
        return capsys.readouterr().out

    return run


@pytest.mark.sweep(0.04)
@pytest.mark.parametrize(("name", "options"), [("hessian_vector", {}), ("gradient_penalty", {"steps": 20}),
                                               ("heat_equation", {"steps": 400})])  # fmt: skip
def test_the_check_at_its_end_agrees(name: str, options: dict[str, Any], said: Said) -> None:
    assert "they agree\n" in said(name, **options)


@pytest.mark.sweep(0)
def test_the_penalty_brings_the_length_of_the_gradient_to_one(said: Said) -> None:
    lines = said("gradient_penalty", steps=60).splitlines()
    lengths = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert abs(lengths[-1] - 1) < 0.2 < abs(lengths[0] - 1)


@pytest.mark.sweep(0)
def test_the_tagger_does_better_than_the_commoner_tag(said: Said) -> None:
    assert said("bracket_tagger", epochs=4, count=1200).endswith("it does better\n")


@pytest.mark.sweep(0)
def test_the_autoencoder_does_better_than_the_mean_image(said: Said) -> None:
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    costs, verdict, *digits = said("digits_vae", epochs=40).splitlines()
    assert "nats" in costs
    assert verdict == "it does better"
    assert len(digits) == 8


@pytest.mark.sweep(0)
def test_the_generator_draws_better_than_independent_pixels(said: Said) -> None:
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    assert "it does better" in said("digits_gan", epochs=16)


@pytest.mark.sweep(0)
def test_explanations_point_at_what_matters(said: Said) -> None:
    pytest.importorskip("sklearn", reason="the digits and the wines are scikit-learn's")
    assert said("explanations", epochs=6).endswith("attributions point at what matters\n")


@pytest.mark.sweep(0)
def test_the_actor_and_the_critic_learn_to_balance(said: Said) -> None:
    assert said("actor_critic", rounds=40).endswith("it learnt to balance\n")


def section_of(path: Path) -> tuple[str, str]:
    """The heading and the text of its section of the gallery."""
    for section in GALLERY.read_text("utf-8").split("\n## "):
        if f"(../../examples/{path.name})" in section:
            heading, _, text = section.partition("\n")
            return heading, text
    raise AssertionError(f"the gallery does not name {path.name}")


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_the_gallery_shows_it(path: Path) -> None:
    """By its name, its picture and a section that the table at the top leads to; the file says how it is run."""
    assert f"python examples/{path.name} [--plot {path.stem}.svg]" in path.read_text("utf-8").split('"""')[1]
    heading, text = section_of(path)
    table = GALLERY.read_text("utf-8").partition("\n## ")[0]
    row = re.search(
        rf"^\| \[.*\]\(#{heading.lower().replace(' ', '-')}\) \|.*\| (\d+) (s|min) \|$", table, re.MULTILINE
    )
    assert row, "it has no row with a run time"
    assert re.search(rf"^!\[[^\]]{{30,}}\]\(gallery/{path.stem}\.svg\)$", text, re.MULTILINE), "it says what one sees"
    assert re.search(r"\d", text), "it has figures"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_a_test_here_runs_it(path: Path) -> None:
    """So it is seen to write its picture."""
    assert f'"{path.stem}"' in Path(__file__).read_text("utf-8")


def test_pictures_are_small_and_shown() -> None:
    pictures = {path.name: path.stat().st_size for path in GALLERY.with_suffix("").iterdir()}
    assert {name for name, size in pictures.items() if size > LARGEST_PICTURE} == set()
    shown = re.findall(r"\]\(gallery/(.*?)\)", GALLERY.read_text("utf-8"))
    assert set(shown) == set(pictures)


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"\d+\.\d+|\d+(?=%)", text)]


@pytest.mark.sweep(0)
def test_what_is_known_is_carried_over(said: Said) -> None:
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    _, frozen, followed = numbers(said("transfer_learning", epochs=8, count=300))
    assert frozen < followed


@pytest.mark.sweep(0)
def test_a_gpt_writes_letters_of_its_text(said: Said) -> None:
    figures, text = said("char_gpt", steps=25, count=30, limit=2).splitlines()
    assert numbers(figures)[0] > 12  # percent of the next characters, of 60 letters
    assert len(text) == len("A step ") + 30


@pytest.mark.sweep(0)
@pytest.mark.parametrize("kind", ["int4", "fp16"])
def test_a_merged_language_model_repeats_its_text(said: Said, kind: str) -> None:
    model = Path(__file__).parents[2] / "examples" / f"tiny_llama_{kind}.onnx"
    *_, text = said("finetune_llm", model=model, steps=100).splitlines()
    assert text == "The quick brown fox jumps over the lazy dog, and then it sleeps."


@pytest.mark.sweep(0)
def test_bert_reads_padded_sentences(said: Said) -> None:
    assert numbers(said("bert_classifier", epochs=3, count=300))[0] > 50


@pytest.mark.sweep(0)
def test_the_unet_finds_shapes(said: Said) -> None:
    found = numbers(said("unet", epochs=2, count=100))
    assert found[2] < 0.65  # the cross entropy; that of a coin is 0.69


@pytest.mark.sweep(0)
def test_ctc_spells(said: Said) -> None:
    assert said("ctc_speech", epochs=1, count=60).count("heard") == 6


@pytest.mark.sweep(0)
def test_forces_teach_more_than_energies(said: Said) -> None:
    assert said("molecule_forces", epochs=60).endswith("training on forces helps\n")


@pytest.mark.sweep(0)
def test_clip_finds_descriptions(said: Said) -> None:
    assert "of 48 descriptions" in said("clip", epochs=1, count=200)


@pytest.mark.sweep(0)
def test_two_tasks_share_a_trunk(said: Said) -> None:
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    digits, _, ink = numbers(said("multi_task", epochs=3))
    assert digits > 70 and ink > 0.5


@pytest.mark.sweep(0)
def test_a_quantised_detector_learns_other_things(said: Said) -> None:
    came, now = said("finetune_detector", epochs=8, count=400).splitlines()
    assert numbers(came)[0] > 50
    assert "5 layers in 8 bits" in now and numbers(now)[0] > 20  # chance is some percent

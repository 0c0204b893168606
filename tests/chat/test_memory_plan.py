"""A recipe that fits into so many bytes: the first that does, in the order of what costs least time."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gradgraph as gg
from gradgraph.chat import Recipe, memory_plan
from gradgraph.chat.memory_plan import PROCESS, planned
from gradgraph.errors import DataError

pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")
pytest.importorskip("jinja2", reason="the extra [llm] is not installed")

from tests.chat import small_folder

LONG = 256
MODEL = gg.surgery.language_model(gg.lora(small_folder.MODEL, "*attn*", rank=2))


@dataclass
class Rows:
    longest: int
    held_out: Any = None


@functools.cache
def built(recompute: bool, accumulate: bool) -> gg.Step:
    return gg.build(
        MODEL, gg.losses.cross_entropy(axis=-1), gg.optim.adamw(1e-3),
        recompute="sqrt" if recompute else None, accumulate=accumulate,
    )  # fmt: skip


def step_of(recipe: Recipe, data: Any = None) -> gg.Step:
    return built(recipe.recompute, recipe.accumulate > 1)


@functools.cache
def estimated(step: gg.Step, options: Any, **sizes: int) -> Any:
    """What is asked for again and again here."""
    return gg.memory(step, options=options, **sizes)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "memory", lambda step, options, **sizes: estimated(step, options, **sizes))


@functools.cache
def bytes_of(rows: int, recompute: bool = False, accumulate: int = 1) -> int:
    return memory_plan.predicted(built(recompute, accumulate > 1), rows, LONG)


def plan(limit: int, **options: Any) -> Any:
    recipe = Recipe(memory=f"{limit}B", batch_size=4, **options)
    return planned(recipe, Rows(LONG), lambda one: Rows(min(LONG, one.length or LONG)), step_of)


def test_the_largest_batch_that_fits_is_taken(quickly: None) -> None:
    whole, half = bytes_of(4), bytes_of(2, accumulate=2)
    least = bytes_of(1, accumulate=4, recompute=True)
    assert least < half < whole
    found, _ = plan(whole)
    assert (found.recipe.batch_size, found.recipe.accumulate, found.recipe.recompute) == (4, 1, False)
    found, _ = plan(whole - 1)
    assert (found.recipe.batch_size, found.recipe.accumulate, found.recipe.recompute) == (2, 2, False)
    assert found.bytes == half and "batches of 2, 2 of them move the weights once" in str(found)
    found, _ = plan(half - 1)  # smaller batches would be slow
    assert found.recipe.recompute and found.recipe.batch_size * found.recipe.accumulate == 4
    found, _ = plan(least, recompute=True)
    assert found.recipe.batch_size == 1 and found.bytes == least


def test_rows_are_shortened_where_that_is_allowed(quickly: None) -> None:
    least = bytes_of(1, accumulate=4, recompute=True)
    with pytest.raises(DataError, match=r"training takes at least .* with batches of 1 .* adapt fewer layers"):
        plan(least - 1, recompute=True)
    found, data = plan(least - 1, recompute=True, long="cut")
    assert found.recipe.length == data.longest == LONG // 2 and found.bytes < least


def no_rows(recipe: Recipe) -> Rows:
    raise DataError("no row is left to train on; take longer ones by length=")


@pytest.mark.parametrize(
    ("options", "says"),
    [({"long": "drop"}, "--target"), ({"loss": "dpo", "long": "cut"}, "left out by --long drop"),
     ({"loss": "dpo"}, "left out by --long drop"), ({}, "shortened by --long cut")],
)  # fmt: skip
def test_memory_is_what_lacks_where_rows_get_no_shorter(quickly: None, options: dict[str, Any], says: str) -> None:
    recipe = Recipe(memory=f"{PROCESS}B", batch_size=1, recompute=True, **options)
    with pytest.raises(DataError, match="training takes at least") as caught:
        planned(recipe, Rows(LONG), no_rows, step_of)
    assert caught.value.in_shell().endswith(says)


def test_a_run_takes_what_was_planned(tmp_path: Path) -> None:
    tight = f"{PROCESS + 4_000_000}B"  # of about 6 million with batches of 8
    found = gg.finetune(
        small_folder.write(tmp_path / "llm"), small_folder.chats(16), tmp_path / "tight", target="*attn*", epochs=1,
        held_out=0.0, merge="none", progress=False, memory=tight,
    )  # fmt: skip
    kept = json.loads((tmp_path / "tight" / "training" / "recipe.json").read_text())
    assert kept["batch_size"] < 8 == kept["batch_size"] * kept["accumulate"]
    assert found.figures["steps"] == 16 / kept["batch_size"]

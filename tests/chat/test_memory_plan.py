"""A recipe that fits into so many bytes: the first that does, in the order of what costs least time."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import gradgraph as gg
from gradgraph.chat import Recipe
from gradgraph.chat.memory_plan import PROCESS, planned
from gradgraph.errors import DataError

pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")
pytest.importorskip("jinja2", reason="the extra [llm] is not installed")

from tests.chat import small_folder

LONG = 128
MODEL = gg.surgery.language_model(gg.lora(small_folder.MODEL, "*attn*", rank=2))


@dataclass
class Rows:
    longest: int


def step_of(recipe: Recipe, data: Any = None) -> gg.Step:
    return gg.build(
        MODEL, gg.losses.cross_entropy(axis=-1), gg.optim.adamw(1e-3),
        recompute="sqrt" if recipe.recompute else None, accumulate=recipe.accumulate > 1,
    )  # fmt: skip


def bytes_of(rows: int, longest: int = LONG, **options: Any) -> int:
    step = step_of(replace(Recipe(), **options))
    batch, sequence = step.manifest.inputs[0].shape
    return PROCESS + gg.memory(step, **{str(batch): rows, str(sequence): longest}).total


def plan(limit: int, **options: Any) -> Any:
    recipe = Recipe(memory=f"{limit}B", **options)
    return planned(recipe, Rows(LONG), lambda one: Rows(min(LONG, one.length or LONG)), step_of)


def test_the_largest_batch_that_fits_is_taken() -> None:
    whole, half, again = bytes_of(8), bytes_of(4, accumulate=2), bytes_of(4, accumulate=2, recompute=True)
    least = bytes_of(1, accumulate=8, recompute=True)
    assert least < again < half < whole
    found, _ = plan(whole)
    assert (found.recipe.batch_size, found.recipe.accumulate, found.recipe.recompute) == (8, 1, False)
    found, _ = plan(whole - 1)
    assert (found.recipe.batch_size, found.recipe.accumulate, found.recipe.recompute) == (4, 2, False)
    assert found.bytes == half and "batches of 4, 2 of them move the weights once" in str(found)
    found, _ = plan(half - 1)
    assert found.recipe.recompute and found.recipe.batch_size * found.recipe.accumulate == 8
    found, _ = plan(least, recompute=True)
    assert found.recipe.batch_size == 1 and found.bytes == least
    with pytest.raises(DataError, match=r"training takes at least .* with batches of 1"):
        plan(least - 1)


def test_rows_are_shortened_where_that_is_allowed() -> None:
    least = bytes_of(1, accumulate=8, recompute=True)
    with pytest.raises(DataError, match="adapt fewer layers"):
        plan(least - 1)
    found, data = plan(least - 1, long="cut")
    assert found.recipe.length == data.longest < LONG and found.bytes < least


def test_a_run_takes_what_was_planned(tmp_path: Path) -> None:
    base = small_folder.write(tmp_path / "llm")
    chats = small_folder.chats(32)
    options: dict[str, Any] = {"target": "*attn*", "epochs": 1, "progress": False, "held_out": 0.0}
    usual = gg.finetune(base, chats, tmp_path / "usual", **options)
    tight = f"{bytes_of(8, 48) - 1}B"
    found = gg.finetune(base, chats, tmp_path / "tight", **options, memory=tight)
    kept = json.loads((tmp_path / "tight" / "training" / "recipe.json").read_text())
    assert kept["batch_size"] < 8 == kept["batch_size"] * kept["accumulate"]
    assert found.figures["steps"] == kept["accumulate"] * usual.figures["steps"]

"""A recipe that fits into so many bytes: the first that does, by what harms least, then costs least time."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir
import pytest

import gradgraph as gg
from gradgraph.backends.ort_native import chunked_scores, in_use
from gradgraph.chat import Recipe, memory_plan
from gradgraph.chat.adapted_layers import MERGING, merging_memory
from gradgraph.chat.chat_recipe import RANK
from gradgraph.chat.memory_plan import LEAST_RANK, LEAST_TOKENS, PROCESS, SHORTEST, Shape, Use, planned
from gradgraph.chat.tokens import Tokens
from gradgraph.errors import DataError
from gradgraph.files import spilled
from gradgraph.files.models import load_model
from gradgraph.runtime.execution.memory import Prediction
from gradgraph.surgery.merged import merge_to_folder

pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")
pytest.importorskip("jinja2", reason="the extra [llm] is not installed")

from tests.chat import small_folder

LONG = 256


@dataclass
class Equal:
    """Rows of the same length."""

    longest: int
    count: int = 12

    def __len__(self) -> int:
        return self.count

    def order(self, seed: int, epoch: int, batch_size: int) -> Any:
        return np.arange(self.count)

    def width_of(self, rows: Any) -> int:
        return self.longest


@dataclass
class Rows:
    longest: int
    held_out: Any = None

    @property
    def train(self) -> Any:
        return Equal(self.longest)


@functools.cache
def built(rank: int | None, recompute: bool, accumulate: bool) -> gg.Step:
    adapted = gg.lora(small_folder.MODEL, "*attn*", rank=rank or RANK)
    return gg.build(
        gg.surgery.language_model(adapted), gg.losses.cross_entropy(axis=-1), gg.optim.adamw(1e-3),
        recompute="sqrt" if recompute else None, accumulate=accumulate,
    )  # fmt: skip


def step_of(recipe: Recipe, data: Any = None) -> gg.Step:
    return built(recipe.rank, recipe.recompute, recipe.accumulate > 1)


class Remembered(Prediction):
    """What is asked for again and again here."""

    def at(self, sizes: Mapping[str, int]) -> Prediction:
        return predicted_at(self, tuple(sizes.items()))


@functools.cache
def predicted_at(whole: Prediction, sizes: tuple[tuple[str, int], ...]) -> Prediction:
    return Prediction.at(whole, dict(sizes))


@functools.cache
def estimated(step: gg.Step) -> Prediction:
    return Remembered.here(step, None, {})


def bytes_for(step: gg.Step, use: Use) -> int:
    return memory_plan.predicted(estimated(step), use)


@functools.cache
def bytes_of(rows: int, recompute: bool = False, accumulate: int = 1, rank: int = RANK) -> int:
    return bytes_for(built(rank, recompute, accumulate > 1), Use(Shape(rows, LONG)))


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    predict_by(monkeypatch, estimated)


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "resident_memory", lambda: memory_plan.BEFORE)


def predict_by(monkeypatch: pytest.MonkeyPatch, found: Callable[[Any], Any]) -> None:
    by_step = SimpleNamespace(here=lambda step, options, sizes: found(step))
    monkeypatch.setattr(memory_plan, "Prediction", by_step)


def cut(recipe: Recipe) -> Rows:
    return Rows(min(LONG, recipe.length or LONG))


def plan(limit: int, **options: Any) -> Any:
    recipe = Recipe(memory=f"{limit}B", batch_size=4, **options)
    return planned(recipe, Rows(LONG), cut, step_of)


def test_the_largest_batch_that_fits_is_taken(quickly: None) -> None:
    whole, half = bytes_of(4), bytes_of(2, accumulate=2)
    least = bytes_of(1, accumulate=4, recompute=True)
    assert least < half < whole
    found, _ = plan(whole)
    assert (found.recipe.batch_size, found.recipe.accumulate, found.recipe.recompute) == (4, 1, False)
    found, _ = plan(whole - 1)
    assert (found.recipe.batch_size, found.recipe.accumulate, found.recipe.recompute) == (2, 2, False)
    assert found.bytes == half and "rank 16, batches of 2, gradients accumulated over 2 batches" in str(found)
    found, _ = plan(half - 1)  # smaller batches would be slow
    assert found.recipe.recompute and found.recipe.batch_size * found.recipe.accumulate == 4
    found, _ = plan(least, recompute=True)
    assert found.recipe.batch_size == 1 and found.bytes == least


def test_the_rank_is_halved_where_nothing_else_helps(quickly: None) -> None:
    least = bytes_of(1, accumulate=4, recompute=True)
    found, data = plan(least - 1, long="cut", alpha=24)  # rather than to learn from half of the text
    assert (found.recipe.rank, data.longest, found.recipe.length) == (RANK // 2, LONG, None)
    assert found.recipe.alpha == 12, "adapters count as many times"
    assert "adapters of rank 8" in str(found)
    assert plan(least, alpha=24)[0].recipe.alpha == 24
    with pytest.raises(DataError, match=r"adapters of rank 16, .* lower the rank, or "):
        plan(least - 1, rank=RANK)  # which is given


def test_rows_are_shortened_where_that_is_allowed(quickly: None) -> None:
    least = bytes_of(1, accumulate=4, recompute=True, rank=LEAST_RANK)
    with pytest.raises(DataError, match=r"smallest plan .*rank 4, batches of 1.* requires .* adapt fewer layers"):
        plan(least - 1, recompute=True)
    found, data = plan(least - 1, recompute=True, long="cut")
    assert found.recipe.length == data.longest == LONG // 2 and found.bytes < least
    assert found.recipe.rank == RANK, "half the length leaves room for it"


Way = tuple[int, int | None, bool, int, int]  # length, rank, recomputation, rows of a batch, batches


def all_ways(recipe: Recipe) -> Iterator[Way]:
    """What could be chosen, the best first: written anew, and all of it."""
    lengths = [LONG >> i for i in range(9) if LONG >> i >= SHORTEST] if recipe.long == "cut" else [LONG]
    ranks = [16, 8, 4] if recipe.rank is None else [recipe.rank]
    sizes = sorted((n for n in range(1, recipe.batch_size + 1) if recipe.batch_size % n == 0), reverse=True)
    for long, rank, again, size in itertools.product(lengths, ranks, (False, True), sizes):
        slow = size < recipe.batch_size and size * long < LEAST_TOKENS
        if again or not (recipe.recompute or slow):
            yield long, rank, again, size, recipe.accumulate * recipe.batch_size // size


@pytest.mark.parametrize("seed", range(40))
def test_no_way_that_is_better_fits(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(seed)
    recipe = Recipe(
        batch_size=draw.choice([1, 4, 6, 12]), accumulate=draw.choice([1, 2]), long=draw.choice(["error", "cut"]),
        rank=draw.choice([None, None, 4, 16]), recompute=draw.choice([False, False, True]),
    )  # fmt: skip
    of_a_rank, of_a_token, sums, kept = (draw.uniform(*range_) for range_ in ((0, 900), (1, 9), (0, 500), (0.2, 1)))

    def taken(long: int, rank: int, again: bool, size: int, added: int) -> int:
        """What training takes grows with each of these, each time by other shares."""
        return round(1000 + rank * (of_a_rank + sums * (added > 1)) + of_a_token * size * long * (kept if again else 1))

    def predicted(step: Any, use: Use, process: int) -> int:
        rank, again, added = step.way
        return taken(use.first.tokens, rank, again, use.first.rows, added)

    predict_by(monkeypatch, lambda step: step)
    monkeypatch.setattr(memory_plan, "predicted", predicted)
    ways = {way: taken(*way) for way in all_ways(recipe)}
    for limit in {draw.choice([*ways.values()]) + draw.choice([-1, 0]) for _ in range(12)}:
        wanted = next((way for way, size in ways.items() if size <= limit), None)
        try:
            found, data = planned(
                recipe.changed({"memory": f"{limit}B"}), Rows(LONG), cut,
                lambda one, _: Built((one.rank, one.recompute, one.accumulate)),
            )  # fmt: skip
        except DataError:
            assert wanted is None
            continue
        r = found.recipe
        assert (data.longest, r.rank, r.recompute, r.batch_size, r.accumulate) == wanted
        assert found.bytes == ways[wanted] <= limit


class Built:
    """A step, known by the way in which it was built."""

    def __init__(self, way: Any) -> None:
        self.way = way


def no_rows(recipe: Recipe) -> Rows:
    raise DataError("no row remains for training; raise length=")


@pytest.mark.parametrize(
    ("options", "says"),
    [({"long": "drop"}, "--target"), ({"loss": "dpo", "long": "cut"}, "drop longer rows with --long drop"),
     ({"loss": "dpo"}, "drop longer rows with --long drop"), ({}, "truncate longer rows with --long cut")],
)  # fmt: skip
def test_memory_is_what_lacks_where_rows_get_no_shorter(quickly: None, options: dict[str, Any], says: str) -> None:
    recipe = Recipe(memory=f"{PROCESS}B", batch_size=1, recompute=True, **options)
    with pytest.raises(DataError, match="smallest plan") as caught:
        planned(recipe, Rows(LONG), no_rows, step_of)
    assert caught.value.in_shell().endswith(says)


def test_each_session_that_runs_forward_alone_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Use] = []
    monkeypatch.setattr(memory_plan, "predicted", lambda step, use, process: used.append(use) or 100)
    held, whole, short = Equal(64, 3), (Shape(8, LONG), Shape(4, LONG)), Shape(3, 64)
    for options, held_out, sampled, evaluated, outputs in (
        ({}, None, 0, (), ()), ({}, held, 0, (short,), ()), ({"sample": "a"}, None, 30, (), (Shape(1, 30),)),
        ({"sample": "a"}, held, 300, (short,), (Shape(1, 300),)), ({"loss": "orpo"}, None, 0, (), ()),
        ({"loss": "orpo"}, held, 0, (short,), (short,)), ({"loss": "dpo"}, held, 0, (short,), whole[:1]),
    ):  # fmt: skip
        step = of_pairs(options["loss"]) if "loss" in options else step_of(Recipe())
        planned(Recipe(memory="1GB", **options), Rows(LONG, held_out), cut, lambda one, _, step=step: step, sampled)
        assert used.pop() == Use(whole[0], whole[1:], evaluated, outputs)


@functools.cache
def of_pairs(loss: str) -> gg.Step:
    model = gg.surgery.pair_model(gg.surgery.language_model(gg.lora(small_folder.MODEL, "*attn*", rank=2)))
    return gg.build(model, gg.losses.by_name(loss), gg.optim.adamw(1e-3))


@pytest.mark.parametrize("packed", [False, True])
def test_the_shapes_of_batches_are_those_of_a_run(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    texts = [Tokens(np.arange(n), np.ones(n, bool)) for n in draw.integers(2, 100, 45)]
    data = gg.chat.ChatBatches(texts, 112, packed=packed)
    model = gg.surgery.language_model(gg.lora(small_folder.MODEL, "*attn*", rank=2), packed=packed)
    trainer = gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1), gg.optim.adamw(1e-3)), seed=3)
    seen, load = list[Shape](), gg.chat.ChatBatches.load

    def watched(self: Any, *args: Any) -> Iterator[Any]:
        for batch in load(self, *args):
            seen.append(Shape(*batch["target"].shape))
            yield batch

    monkeypatch.setattr(gg.chat.ChatBatches, "load", watched)
    trainer.fit(data, epochs=2, batch_size=4, progress=False)
    first, *others = seen
    found = Use.of(Recipe(epochs=2, batch_size=4, seed=3), Prepared(data), False, 0, 0)
    assert found.first == first and not found.evaluated + found.predicted
    assert all(any(shape.fits(other) for other in found.others) for shape in others if shape != first)
    assert set(found.others) <= set(others)


@dataclass
class Prepared:
    train: gg.chat.ChatBatches
    held_out: None = None
    longest: int = LONG


def test_each_session_takes_memory_of_its_own() -> None:
    step = built(RANK, False, False)
    alone = bytes_for(step, Use(Shape(4, LONG)))
    both = bytes_for(step, Use(Shape(4, LONG), others=(Shape(4, LONG // 2), Shape(1, LONG))))
    found = estimated(step)
    at = lambda rows, tokens: found.at(memory_plan._sizes(found, Shape(rows, tokens)))  # noqa: E731
    assert both - alone >= at(4, LONG // 2).memory.peak > at(1, LONG).memory.peak
    evaluated = bytes_for(step, Use(Shape(4, LONG), evaluated=(Shape(4, LONG),)))
    assert alone < evaluated < 2 * alone - PROCESS
    assert bytes_for(step, Use(Shape(4, LONG), predicted=(Shape(1, 2),))) < evaluated


def test_the_best_state_and_the_heads_evaluation_count() -> None:
    step, batch = built(RANK, False, False), Shape(2, LONG)
    state = sum(spec.nbytes for spec in step.manifest.state)
    assert bytes_for(step, Use(batch, keeps_best=True)) == bytes_for(step, Use(batch)) + state
    whole, split = (
        bytes_for(step, Use(batch, evaluated=(batch,), keeps_features=features)) for features in (False, True)
    )
    again = estimated(step).at(memory_plan._sizes(estimated(step), batch)).evaluation
    assert split - whole >= again.total > 0
    for options in ({}, {"patience": 2}, {"keep_features": True}):
        used = Use.of(Recipe(**options), Rows(LONG), False, 0, 0)
        assert (used.keeps_best, used.keeps_features) == ("patience" in options, "keep_features" in options)


@pytest.mark.skipif(bool(in_use.found().why_not), reason="the native kernels are not built")
def test_chunks_of_scores_count_in_the_first_session_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the number of rows is unknown, the scores of all tokens are in memory at once."""
    step, options = built(RANK, False, False), gg.RuntimeOptions(native_kernels=True)
    rows, tokens = step.manifest.inputs[0].shape
    whole, chunks = (Prediction.here(step, options, {str(rows): 32, str(tokens): LONG // 8}) for _ in range(2))
    assert whole.memory.peak > 4 * 98 * 32 * (LONG // 8)
    monkeypatch.setattr(chunked_scores, "PIECE", 1 << 12)
    assert chunks.memory.peak < whole.memory.peak
    assert (chunks.training, chunks.evaluation) == (whole.training, whole.evaluation)


RUN = Recipe(memory="1GB", batch_size=4, long="cut")


@pytest.mark.parametrize("chosen", [
    {}, {"rank": 8}, {"batch_size": 2, "accumulate": 2}, {"batch_size": 1, "accumulate": 4, "recompute": True},
    {"length": 128, "recompute": True},
])  # fmt: skip
def test_a_resumed_run_keeps_its_recipe(quickly: None, chosen: dict[str, Any]) -> None:
    began = {"rank": RANK, "batch_size": 4, "accumulate": 1, "recompute": False, "length": None, **chosen}
    found, data = planned(RUN, Rows(LONG), cut, step_of, began=began)
    assert {name: getattr(found.recipe, name) for name in began} == began
    assert data.longest == (chosen.get("length") or LONG)
    with pytest.raises(DataError, match=r"began with .* which now requires .* in another folder"):
        planned(RUN.changed({"memory": f"{PROCESS - memory_plan.GRAIN}B"}), Rows(LONG), cut, step_of, began=began)


@pytest.mark.parametrize("other", [{"batch_size": 3}, {"accumulate": 2}, {"rank": 5}, {"length": 100}, {}])
def test_a_run_that_began_otherwise_is_planned_anew(quickly: None, other: dict[str, Any]) -> None:
    began = {"rank": RANK, "batch_size": 4, "accumulate": 1, "recompute": False, "length": None, **other}
    found, _ = planned(RUN, Rows(LONG), cut, step_of, began=began if other else {})
    assert (found.recipe.batch_size, found.recipe.rank, found.recipe.length) == (4, RANK, None)


@pytest.mark.parametrize(("resident", "further"), [(None, 0), (100, 0), (150, 0), (151, 16), (182, 32), (183, 48)])
def test_what_the_process_occupies_counts(
    quickly: None, resident: int | None, further: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "resident_memory", lambda: resident and resident << 20)
    found, _ = plan(1 << 30)
    assert found.bytes == bytes_of(4) + (further << 20)
    assert found.spare == (1 << 30) - found.bytes


def test_kinds_without_rank_keep_all(quickly: None) -> None:
    with pytest.raises(DataError, match="plan \\(batches of 1, an update"):
        planned(Recipe(memory="1B", kind="ia3", batch_size=1, recompute=True), Rows(LONG), cut, step_of)


@pytest.mark.parametrize("requantise", [False, True])
def test_weights_that_are_merged_lie_in_a_file(
    requantise: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spilled, "LEAST_BYTES", 256)  # the model is small
    adapted = gg.lora(load_model(small_folder.MODEL), ["*attn*", "*mlp*"], rank=2)
    rng = np.random.default_rng(0)
    state = {
        name: rng.standard_normal(value.shape.numpy()).astype(np.float32)
        for name, value in adapted.graph.initializers.items()
        if "lora" in name
    }
    usual = gg.surgery.merge_adapters(adapted, state, requantise=requantise)
    found, roundings = merge_to_folder(adapted, state, tmp_path, requantise=requantise)
    before = {name: v.const_value for name, v in adapted.graph.initializers.items()}
    assert usual.graph.initializers.keys() == found.graph.initializers.keys()
    for name, value in found.graph.initializers.items():
        assert np.array_equal(value.const_value.numpy(), usual.graph.initializers[name].const_value.numpy())
        if value.const_value is not before.get(name) and value.const_value.nbytes >= 256:
            assert isinstance(value.const_value, onnx_ir.ExternalTensor)
            assert Path(value.const_value.path).parent == tmp_path
    assert len(roundings) == (10 if requantise else 0) and len(list(tmp_path.iterdir())) == 1


def test_a_trainer_goes_on_after_its_sessions_are_closed() -> None:
    step, ids = built(2, False, False), np.arange(32).reshape(2, 16)
    batch = {"input_ids": ids, "target": ids}
    one, other = gg.Trainer(step), gg.Trainer(step)
    for trainer in (one, other):
        trainer.step(batch)
        trainer.evaluate(batch)
    other.close_sessions()
    assert other.evaluate(batch) == one.evaluate(batch)
    assert other.step(batch) == one.step(batch)


def test_the_largest_layer_that_is_merged_counts(quickly: None) -> None:
    step, decoder = built(RANK, True, False), load_model(small_folder.MODEL)
    largest = MERGING * 32 * 64  # queries, keys and values together
    assert merging_memory(decoder, Recipe(target="*attn*")) == largest
    rounding = 44 * 32**2 + 2 * 4 * (4 * 32**2)  # one layer, and the products of the inputs of four
    assert merging_memory(decoder, Recipe(target="*attn*", merge="requantised")) == largest + rounding
    assert merging_memory(decoder, Recipe(target="*attn*", merge="none")) == 0
    batch, much = Shape(1, LONG), 10**9
    usual = bytes_for(step, Use(batch))
    assert bytes_for(step, Use(batch, merges=1)) == usual
    assert bytes_for(step, Use(batch, merges=much)) >= PROCESS + much > usual


def test_a_run_takes_what_was_planned(tmp_path: Path) -> None:
    tight = f"{PROCESS + 29_000_000}B"  # of about 32 million with batches of 8
    found = gg.finetune(
        small_folder.write(tmp_path / "llm"), small_folder.chats(16), tmp_path / "tight", target="*attn*", epochs=1,
        held_out=0.0, merge="none", progress=False, memory=tight,
    )  # fmt: skip
    kept = json.loads((tmp_path / "tight" / "training" / "recipe.json").read_text())
    assert kept["batch_size"] < 8 == kept["batch_size"] * kept["accumulate"]
    assert found.figures["steps"] == 16 / kept["batch_size"]
    adapter = json.loads((tmp_path / "tight" / "adapter" / "adapter_config.json").read_text())
    assert kept["rank"] == adapter["r"] and adapter["lora_alpha"] == 2 * adapter["r"]
    assert f"| rank | `{kept['rank']}` |" in (tmp_path / "tight" / "README.md").read_text()

"""``memory``: a recipe that fits into so many bytes, chosen by the predicted peak of training; nothing is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import onnx

from gradgraph.chat.chat_recipe import Recipe
from gradgraph.errors import DataError, readable_bytes
from gradgraph.runtime.execution.memory import all_sizes_of, memory, opened_here, walked
from gradgraph.runtime.loop.sizing import limit_of
from gradgraph.step.step import Step

PROCESS = 350 << 20  # bytes of the interpreter with its libraries, the graphs and the sessions of 16 layers
WORKSPACES = 0.05  # of the prediction: what kernels take for themselves (4 % were measured at most)
LEAST_TOKENS = 512  # of a batch: with fewer, products are slow, and it is rather computed again
SHORTEST = 32  # tokens of a row that is chosen


class Data(Protocol):
    """Data of which this is known: the tokens of the longest row, filled up, and what is measured on."""

    @property
    def longest(self) -> int: ...

    @property
    def held_out(self) -> Any: ...


D = TypeVar("D", bound=Data)


@dataclass(frozen=True)
class Plan:
    """A recipe with a prediction.

    Attributes:
        recipe: with the batch, accumulation, recomputation and length that were chosen.
        bytes: of the process at the peak of training.
    """

    recipe: Recipe
    bytes: int

    def __str__(self) -> str:
        r = self.recipe
        steps = f"{r.accumulate} of them move the weights once" if r.accumulate > 1 else "each moves the weights"
        again = "the forward pass is computed again in parts" if r.recompute else "nothing is computed again"
        cut = f", at most {r.length} tokens a row" if r.length is not None else ""
        return (
            f"memory {r.memory}: batches of {r.batch_size}, {steps}, {again}{cut}; predicted "
            f"{readable_bytes(self.bytes)}"
        )


def planned(
    recipe: Recipe, data: D, prepare: Callable[[Recipe], D], build: Callable[[Recipe, D], Step]
) -> tuple[Plan, D]:
    """The recipe that fits, and takes the least time by a rule of thumb, with its data.

    As many rows as were asked for move the weights once, in smaller batches; rows are only shortened where ``long``
    says what becomes of longer ones.

    Args:
        recipe: with ``memory``.
        data: of this recipe.
        prepare: gives the data of another one.
        build: gives the step of a recipe on its data.

    Raises:
        DataError: nothing fits.
    """
    assert recipe.memory is not None
    limit = limit_of(f"auto:{recipe.memory}")
    assert limit is not None  # as the number is there
    least: Plan | None = None
    for shorter in _lengths(recipe, data.longest):
        try:
            data = data if shorter is recipe else prepare(shorter)
        except DataError:  # no row is so short
            break
        steps: dict[tuple[bool, bool], Step] = {}
        for one in _ways(shorter, data.longest):
            kind = one.recompute, one.accumulate > 1
            if kind not in steps:
                steps[kind] = build(one, data)
            plan = Plan(one, predicted(steps[kind], one.batch_size, data.longest, _answers(one, data)))
            if plan.bytes <= limit:
                return plan, data
            least = plan if least is None or plan.bytes < least.bytes else least
    assert least is not None  # there is one way at least
    way = "drop" if recipe.prefers else "cut"  # half an answer is not preferred
    shorten = "" if _shortens(recipe) else f", or let longer rows be {'left out' if way == 'drop' else 'shortened'} by "
    raise DataError(
        f"training takes at least {readable_bytes(least.bytes)}, with batches of {least.recipe.batch_size} and the "
        f"forward pass computed again, and memory is {recipe.memory}",
        remedy="allow more, or adapt fewer layers by target=" + (shorten and f"{shorten}long='{way}'"),
        shell="allow more, or adapt fewer layers by --target" + (shorten and f"{shorten}--long {way}"),
    )


def predicted(step: Step, rows: int, longest: int, answers: bool = False) -> int:
    """The bytes of a process at the peak of a run, pages of mapped files among them.

    Args:
        step: what is trained.
        rows: of a batch.
        longest: tokens of a row.
        answers: whether the model also runs forward alone: for held-out rows, a reference, samples.
    """
    sizes = _sizes(step, rows, longest)
    held = stored(step)
    state = sum(spec.nbytes for spec in step.manifest.state)  # once more, as it is read to be written
    training = PROCESS + held + state + round((1 + WORKSPACES) * memory(step, options=None, **sizes).total)
    return training + (held + forward(step, sizes) if answers else 0)


def stored(step: Step) -> int:
    """The bytes of integers in which frozen weights are stored; ``memory`` counts floats."""
    counted = {*step.manifest.frozen, *(spec.name for spec in step.manifest.state)}
    found = {t.name: t for model in (step.eval, *step.trains.values()) for t in model.graph.initializer}
    return sum(
        math.prod(t.dims) * onnx.helper.tensor_dtype_to_np_dtype(t.data_type).itemsize
        for name, t in found.items()
        if name not in counted
    )


def forward(step: Step, sizes: Mapping[str, int]) -> int:
    """The bytes that the session of evaluation takes beside that of training, without weights."""
    opened = opened_here(step, None)
    return walked(opened.lowered(step.eval, all_sizes_of(step.manifest, sizes))).taken


def _answers(recipe: Recipe, data: Data) -> bool:
    return bool(data.held_out is not None or recipe.sample or recipe.prefers)


def _lengths(recipe: Recipe, longest: int) -> Iterator[Recipe]:
    """The recipe, and where rows may be shortened, the same with half the tokens, and so on."""
    yield recipe
    while _shortens(recipe) and longest // 2 >= SHORTEST:
        longest //= 2
        yield replace(recipe, length=longest)


def _shortens(recipe: Recipe) -> bool:
    """Whether rows may be shortened, or left out; answers that are compared are not cut."""
    return recipe.long == "drop" or (recipe.long == "cut" and not recipe.prefers)


def _ways(recipe: Recipe, longest: int) -> Iterator[Recipe]:
    """Batches that go into what is asked for without a rest, the largest first; then the same with recomputation."""
    rows = recipe.batch_size
    sizes = [size for size in range(rows, 0, -1) if rows % size == 0]
    for again in (True,) if recipe.recompute else (False, True):
        for size in sizes:
            if again or size == rows or size * longest >= LEAST_TOKENS:
                yield replace(recipe, batch_size=size, accumulate=recipe.accumulate * (rows // size), recompute=again)


def _sizes(step: Step, rows: int, longest: int) -> dict[str, int]:
    """The open dimensions of a step on so many rows of so many tokens: the first and the last of its tokens."""
    shape = step.manifest.inputs[0].shape
    return {name: size for name, size in ((shape[0], rows), (shape[-1], longest)) if isinstance(name, str)}

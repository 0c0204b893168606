"""``memory``: a recipe that fits into so many bytes, chosen by the predicted peak of training; nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import onnx_ir as ir

from gradgraph.chat.chat_recipe import RANK, Recipe
from gradgraph.errors import DataError, readable_bytes
from gradgraph.runtime.execution.memory import (
    all_sizes_of,
    bytes_of,
    frozen_tensors,
    memory,
    opened_here,
    walked,
)
from gradgraph.runtime.loop.sizing import limit_of
from gradgraph.step.step import Step
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS
from gradgraph.surgery.adapter_kinds.kind import NO_RANK

PROCESS = 350 << 20  # bytes of the interpreter with its libraries, the graphs and the sessions of 16 layers
WORKSPACES = 0.05  # of the prediction: what kernels take for themselves (4 % were measured at most)
MERGING = 48  # bytes for each weight of a layer that is merged, in float64, and quantised again (45 were measured)
LEAST_RANK = 4  # that is chosen: what a layer learns by fewer is little, and little is saved
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
        recipe: with the rank, batch, accumulation, recomputation and length that were chosen.
        bytes: of the process at its peak.
    """

    recipe: Recipe
    bytes: int

    def __str__(self) -> str:
        return f"memory {self.recipe.memory}: {self.told}; predicted {readable_bytes(self.bytes)}"

    @property
    def told(self) -> str:
        """The choice, in words."""
        r = self.recipe
        rank = [f"adapters of rank {r.rank}"] if _has_rank(r) else []
        steps = f"{r.accumulate} of them move the weights once" if r.accumulate > 1 else "each moves the weights"
        again = "the forward pass is computed again in parts" if r.recompute else "nothing is computed again"
        cut = [f"at most {r.length} tokens a row"] if r.length is not None else []
        return ", ".join((*rank, f"batches of {r.batch_size}", steps, again, *cut))


def planned(
    recipe: Recipe, data: D, prepare: Callable[[Recipe], D], build: Callable[[Recipe, D], Step], merges: int = 0
) -> tuple[Plan, D]:
    """The recipe that fits, and of such that which harms least what is learnt, then takes the least time by a rule of
    thumb; with its data.

    As many rows as were asked for move the weights once, in smaller batches. Where none of these fits, the rank is
    halved, unless it is given; where this does not help, rows are shortened, if ``long`` says what becomes of longer
    ones.

    Args:
        recipe: with ``memory``.
        data: of this recipe.
        prepare: gives the data of another one.
        build: gives the step of a recipe on its data.
        merges: the weights of the largest layer that is merged; 0 where none is.

    Raises:
        DataError: nothing fits.
    """
    assert recipe.memory is not None
    limit = limit_of(f"auto:{recipe.memory}")
    assert limit is not None  # as the number is there
    search, lower = _Search(limit, build, merges), _lower_ranks(recipe)
    for shorter in _lengths(recipe, data.longest):
        try:
            data = data if shorter is recipe else prepare(shorter)
        except DataError:  # no row is so short
            break
        usual = shorter.settled
        found = search.first(usual, data)
        if found is None and lower and (lowest := search.first(usual.of_rank(lower[-1]), data)):  # else none fits
            between = (search.first(usual.of_rank(rank), data) for rank in lower[:-1])
            found = next(filter(None, between), lowest)
        if found is not None:
            return found, data
    raise _too_little(recipe, search.least)


class _Search(Generic[D]):
    """Plans that are tried, one after the other; the least of them is kept.

    Args:
        limit: bytes.
        build: gives the step of a recipe on its data.
        merges: the weights of the largest layer that is merged.
    """

    def __init__(self, limit: int, build: Callable[[Recipe, D], Step], merges: int) -> None:
        self._limit, self._build, self._merges = limit, build, merges
        self._steps: dict[tuple[int | None, ...], Step] = {}
        self._least: Plan | None = None

    @property
    def least(self) -> Plan:
        assert self._least is not None  # there is one way at least
        return self._least

    def first(self, recipe: Recipe, data: D) -> Plan | None:
        """The first way of a recipe that fits."""
        self._steps.clear()  # of other data, or ranks
        return next((plan for one in _ways(recipe, data.longest) if (plan := self.fits(one, data))), None)

    def fits(self, recipe: Recipe, data: D) -> Plan | None:
        """The plan of a recipe, if it fits."""
        kind = recipe.rank, recipe.recompute, recipe.accumulate > 1
        if kind not in self._steps:
            self._steps[kind] = self._build(recipe, data)
        taken = predicted(self._steps[kind], recipe.batch_size, data.longest, _sessions(recipe, data), self._merges)
        plan = Plan(recipe, taken)
        if self._least is None or plan.bytes < self._least.bytes:
            self._least = plan
        return plan if plan.bytes <= self._limit else None


def _too_little(recipe: Recipe, least: Plan) -> DataError:
    """The error where nothing fits, with all that helps."""
    way = "drop" if recipe.prefers else "cut"  # half an answer is not preferred
    given = _has_rank(recipe) and recipe.rank is not None and recipe.rank > LEAST_RANK
    longer = "" if _shortens(recipe) else f", or let longer rows be {'left out' if way == 'drop' else 'shortened'} by "
    adapt = f"allow more, {'take a smaller rank, ' if given else ''}or adapt fewer layers by "
    return DataError(
        f"it takes at least {readable_bytes(least.bytes)}, with {least.told}, and memory is {recipe.memory}",
        remedy=f"{adapt}target=" + (longer and f"{longer}long='{way}'"),
        shell=f"{adapt}--target" + (longer and f"{longer}--long {way}"),
    )


def predicted(step: Step, rows: int, longest: int, sessions: int = 0, merges: int = 0) -> int:
    """The bytes of a process at the peak of a run, pages of mapped files among them.

    Args:
        step: what is trained.
        rows: of a batch.
        longest: tokens of a row.
        sessions: that run the model forward alone, each with memory of its own.
        merges: the weights of the largest layer that is merged; 0 where none is. By then sessions of training are
            closed, and new weights lie in a file, of which what is read does not stay in memory.
    """
    sizes = _sizes(step, rows, longest)
    state = sum(spec.nbytes for spec in step.manifest.state)  # once more, as it is read to be written
    taken = memory(step, options=None, **sizes)
    training = PROCESS + state + round((1 + WORKSPACES) * (taken.total - taken.session))  # ``PROCESS`` has that
    alone = integers(step) + forward(step, sizes)
    training += sessions * alone
    merging = PROCESS + 2 * state + taken.frozen + max(alone, MERGING * merges)
    return max(training, merging if merges else 0)


def integers(step: Step) -> int:
    """The bytes of the integers in which weights are stored, of which a second session has a copy."""
    return sum(bytes_of(t) for t in frozen_tensors(step) if not ir.DataType(t.data_type).is_floating_point())


def forward(step: Step, sizes: Mapping[str, int]) -> int:
    """The bytes that the session of evaluation takes beside that of training, without weights."""
    opened = opened_here(step, None)
    return walked(opened.lowered(step.eval, all_sizes_of(step.manifest, sizes))).taken


def _sessions(recipe: Recipe, data: Data) -> int:
    """The sessions that run the model forward alone: one evaluates held-out rows, one predicts for pairs or samples."""
    return (data.held_out is not None) + bool(recipe.sample or recipe.prefers)


def _lengths(recipe: Recipe, longest: int) -> Iterator[Recipe]:
    """The recipe, and where rows may be shortened, the same with half the tokens, and so on."""
    yield recipe
    while _shortens(recipe) and longest // 2 >= SHORTEST:
        longest //= 2
        yield replace(recipe, length=longest)


def _shortens(recipe: Recipe) -> bool:
    """Whether rows may be shortened, or left out; answers that are compared are not cut."""
    return recipe.long == "drop" or (recipe.long == "cut" and not recipe.prefers)


def _has_rank(recipe: Recipe) -> bool:
    """Whether adapters of this kind have a rank, by which their size goes."""
    return KINDS[recipe.kind].axes != NO_RANK


def _lower_ranks(recipe: Recipe) -> list[int]:
    """Halves of the usual rank; none where one is given."""
    if recipe.rank is not None or not _has_rank(recipe):
        return []
    return [rank for rank in (RANK >> i for i in range(1, RANK.bit_length())) if rank >= LEAST_RANK]


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

"""Option ``memory``: choose a recipe whose predicted peak memory is below a limit, without running a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from gradgraph.chat.chat_batches import ChatBatches
from gradgraph.chat.chat_recipe import RANK, Recipe
from gradgraph.chat.preferences import TARGET, PairBatches
from gradgraph.errors import DataError, readable_bytes
from gradgraph.runtime.execution.memory import Prediction, SessionMemory
from gradgraph.runtime.loop.sizing import limit_of
from gradgraph.step.step import Step
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS
from gradgraph.surgery.adapter_kinds.kind import NO_RANK

PROCESS = 250 << 20  # bytes of the interpreter with libraries and graphs (180 were measured), without sessions
WORKSPACES = 0.05  # of the prediction: temporary buffers of kernels (at most 4 % were measured)
LEAST_RANK = 4  # minimum rank chosen automatically: a lower one learns less and saves little
LEAST_TOKENS = 512  # minimum batch tried before recomputation: smaller matrix products are slow
SHORTEST = 32  # minimum row length chosen automatically


Batches = ChatBatches | PairBatches


class Data(Protocol):
    """Prepared data: ``longest``, the tokens of the longest padded row, and the batches for training and validation."""

    @property
    def longest(self) -> int: ...

    @property
    def train(self) -> Batches: ...

    @property
    def held_out(self) -> Batches | None: ...


class Shape(NamedTuple):
    """The sizes of a batch: its rows, and tokens per row."""

    rows: int
    tokens: int

    def fits(self, other: Shape) -> bool:
        """Whether a batch of this shape needs at most the memory of one of the ``other`` shape."""
        return self.rows <= other.rows and self.tokens <= other.tokens


@dataclass(frozen=True)
class Use:
    """The largest batches of each session of a run, and what is merged after it.

    A session has several largest batches if one has more rows, and another more tokens per row.

    Attributes:
        first: the first batch, for whose shape a training session is specialised.
        others: the largest batches of the training session for all other shapes; empty if there are none.
        evaluated: the largest batches of held-out rows; empty without these.
        predicted: the largest batches of the session of the model's outputs; empty if there is none.
        merges: the bytes that merging a layer requires; 0 if none is merged.
    """

    first: Shape
    others: tuple[Shape, ...] = ()
    evaluated: tuple[Shape, ...] = ()
    predicted: tuple[Shape, ...] = ()
    merges: int = 0

    @classmethod
    def of(cls, recipe: Recipe, data: Data, refers: bool, sampled: int, merges: int) -> Use:
        """Return the use of a run.

        Args:
            refers: whether the log-probabilities of all pairs are computed before training.
            sampled: the number of tokens of the longest sample; 0 without samples.
            merges: as in the attributes.
        """
        shapes, held = list(_trained(data.train, recipe)), data.held_out
        first, *others = dict.fromkeys(shapes)
        evaluated = [] if held is None else _in_order(held, range(len(held)), recipe.batch_size)
        predicted = [*evaluated] if recipe.prefers else []
        if refers:
            predicted += _in_order(data.train, range(len(data.train)), recipe.batch_size)
        if sampled:
            predicted.append(Shape(1, sampled))
        return cls(first, _largest(others), _largest(evaluated), _largest(predicted), merges)


def _trained(data: Batches, recipe: Recipe) -> Iterator[Shape]:
    """Yield the shape of each batch of a run, in the order of training."""
    for epoch in range(recipe.epochs):
        order = data.order(recipe.seed, epoch, recipe.batch_size).tolist()
        yield from _in_order(data, order, recipe.batch_size)


def _in_order(data: Batches, order: Sequence[int], size: int) -> list[Shape]:
    """Return the shapes of batches of ``size`` rows, which are taken in this order."""
    batches = (order[first : first + size] for first in range(0, len(order), size))
    return [Shape(len(rows), data.width_of(rows)) for rows in batches]


def _largest(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """Return the shapes that fit no other shape."""
    found: list[Shape] = []
    for shape in sorted(set(shapes), reverse=True):
        if not any(shape.fits(other) for other in found):
            found.append(shape)
    return tuple(found)


D = TypeVar("D", bound=Data)


@dataclass(frozen=True)
class Plan:
    """A recipe with its predicted memory.

    Attributes:
        recipe: the recipe with the chosen rank, batch size, accumulation, recomputation and length.
        bytes: predicted peak of the process.
    """

    recipe: Recipe
    bytes: int

    def __str__(self) -> str:
        return f"memory {self.recipe.memory}: {self.told}; predicted {readable_bytes(self.bytes)}"

    @property
    def told(self) -> str:
        """The chosen options, as text."""
        r = self.recipe
        rank = [f"adapters of rank {r.rank}"] if _has_rank(r) else []
        steps = f"gradients accumulated over {r.accumulate} batches" if r.accumulate > 1 else "an update after each"
        again = "activations recomputed" if r.recompute else "no recomputation"
        cut = [f"at most {r.length} tokens per row"] if r.length is not None else []
        return ", ".join((*rank, f"batches of {r.batch_size}", steps, again, *cut))


def planned(
    recipe: Recipe,
    data: D,
    prepare: Callable[[Recipe], D],
    build: Callable[[Recipe, D], Step],
    sampled: int = 0,
    merges: int = 0,
) -> tuple[Plan, D]:
    """Choose a recipe that fits the memory limit; return its plan and its data.

    Of the recipes that fit, the one with the least effect on the result is chosen, and among equals the fastest by a
    rule of thumb. Batches are first split by gradient accumulation, which keeps the rows per update. If no split fits,
    the rank is halved, unless the recipe sets it. If that does not suffice, the row length is halved, provided that
    ``long`` is "drop" or "cut".

    Args:
        recipe: a recipe with ``memory``.
        data: the data of this recipe.
        prepare: prepares the data of another recipe.
        build: builds the step of a recipe for its data.
        sampled: the number of tokens of the longest sample; 0 without samples.
        merges: the bytes that merging a layer requires; 0 if none is merged.

    Raises:
        DataError: no recipe fits.
    """
    assert recipe.memory is not None
    limit = limit_of(f"auto:{recipe.memory}")
    assert limit is not None  # the recipe sets ``memory``
    search, lower = _Search(limit, build, sampled, merges), _lower_ranks(recipe)
    for shorter in _lengths(recipe, data.longest):
        try:
            data = data if shorter is recipe else prepare(shorter)
        except DataError:  # no row remains at this length
            break
        usual = shorter.settled
        found = search.first(usual, data)
        if found is None and lower and (lowest := search.first(usual.of_rank(lower[-1]), data)):  # else no rank fits
            between = (search.first(usual.of_rank(rank), data) for rank in lower[:-1])
            found = next(filter(None, between), lowest)
        if found is not None:
            return found, data
    raise _too_little(recipe, search.least)


class _Search(Generic[D]):
    """A search over plans for the first within ``limit`` bytes; keeps the smallest plan, for the message."""

    def __init__(self, limit: int, build: Callable[[Recipe, D], Step], sampled: int, merges: int) -> None:
        self._limit, self._build, self._sampled, self._merges = limit, build, sampled, merges
        self._steps: dict[tuple[int | None, ...], Step] = {}
        self._least: Plan | None = None

    @property
    def least(self) -> Plan:
        assert self._least is not None  # there is at least one
        return self._least

    def first(self, recipe: Recipe, data: D) -> Plan | None:
        """Return the plan of the first variant of a recipe (batch size, recomputation) that fits, else None."""
        self._steps.clear()  # they belong to other data or a different rank
        return next((plan for one in _ways(recipe, data.longest) if (plan := self.fits(one, data))), None)

    def fits(self, recipe: Recipe, data: D) -> Plan | None:
        """Return the plan of a recipe if its predicted memory is within the limit, otherwise None."""
        kind = recipe.rank, recipe.recompute, recipe.accumulate > 1
        if kind not in self._steps:
            self._steps[kind] = self._build(recipe, data)
        step = self._steps[kind]
        refers = any(spec.name == TARGET for spec in step.manifest.targets) and recipe.prefers
        plan = Plan(recipe, predicted(step, Use.of(recipe, data, refers, self._sampled, self._merges)))
        if self._least is None or plan.bytes < self._least.bytes:
            self._least = plan
        return plan if plan.bytes <= self._limit else None


def _too_little(recipe: Recipe, least: Plan) -> DataError:
    """Return the error for a limit that no recipe fits, with all remedies."""
    way = "drop" if recipe.prefers else "cut"  # truncated answers cannot be compared
    given = _has_rank(recipe) and recipe.rank is not None and recipe.rank > LEAST_RANK
    longer = "" if _shortens(recipe) else f", or {'drop' if way == 'drop' else 'truncate'} longer rows with "
    adapt = f"raise it, {'lower the rank, ' if given else ''}or adapt fewer layers with "
    return DataError(
        f"the smallest plan ({least.told}) requires {readable_bytes(least.bytes)}, but memory is {recipe.memory}",
        remedy=f"{adapt}target=" + (longer and f"{longer}long='{way}'"),
        shell=f"{adapt}--target" + (longer and f"{longer}--long {way}"),
    )


def predicted(step: Step, use: Use) -> int:
    """Return the peak memory of a run of ``step`` in bytes, including pages of mapped files.

    Training sessions are closed before layers are merged, one at a time; merged weights are in a file whose pages do
    not stay in memory. The model to merge contains the initial values of the adapters.
    """
    memory = Prediction.here(step, None, _sizes(step, use.first)).memory

    def largest(kind: str, batches: Iterable[Shape]) -> SessionMemory:
        found = (getattr(Prediction.here(step, None, _sizes(step, batch)), kind) for batch in batches)
        return max(found, key=lambda one: one.total, default=SessionMemory(0, 0, 0))

    evaluation = largest("evaluation", use.evaluated)
    further = largest("training", use.others), evaluation, largest("prediction", use.predicted)
    temporary = memory.peak + memory.gaps + sum(one.temporary for one in further)
    sessions = memory.session + sum(one.graph + one.copies for one in further)
    training = memory.batch + sessions + round((1 + WORKSPACES) * temporary)
    state = memory.weights + memory.optimizer + memory.following
    merging = 0
    if use.merges:  # needs the graph of the merged model, and first a copy of the state, then of the adapters
        each = memory.weights + use.merges
        measured = evaluation.temporary + evaluation.graph
        merging = memory.session + max(memory.weights + memory.optimizer, each, measured)
    return PROCESS + memory.weights + state + memory.frozen + max(training, merging)


def _lengths(recipe: Recipe, longest: int) -> Iterator[Recipe]:
    """Yield the recipe and, if rows may be shortened, recipes with half the tokens, a quarter, and so on."""
    yield recipe
    while _shortens(recipe) and longest // 2 >= SHORTEST:
        longest //= 2
        yield replace(recipe, length=longest)


def _shortens(recipe: Recipe) -> bool:
    """Whether rows may be cut or dropped; answers that are compared are not cut."""
    return recipe.long == "drop" or (recipe.long == "cut" and not recipe.prefers)


def _has_rank(recipe: Recipe) -> bool:
    """Whether adapters of this kind have a rank, which determines their size."""
    return KINDS[recipe.kind].axes != NO_RANK


def _lower_ranks(recipe: Recipe) -> list[int]:
    """Return the default rank halved once, twice, and so on; empty if the recipe sets a rank or has none."""
    if recipe.rank is not None or not _has_rank(recipe):
        return []
    return [rank for rank in (RANK >> i for i in range(1, RANK.bit_length())) if rank >= LEAST_RANK]


def _ways(recipe: Recipe, longest: int) -> Iterator[Recipe]:
    """Yield the recipe with each divisor of its batch size (and more accumulation), then with recomputation."""
    rows = recipe.batch_size
    sizes = [size for size in range(rows, 0, -1) if rows % size == 0]
    for again in (True,) if recipe.recompute else (False, True):
        for size in sizes:
            if again or size == rows or size * longest >= LEAST_TOKENS:
                yield replace(recipe, batch_size=size, accumulate=recipe.accumulate * (rows // size), recompute=again)


def _sizes(step: Step, batch: Shape) -> dict[str, int]:
    """Return the sizes of a step's symbolic dimensions, by name: rows per batch, and tokens per row."""
    shape = step.manifest.inputs[0].shape
    return {name: size for name, size in ((shape[0], batch.rows), (shape[-1], batch.tokens)) if isinstance(name, str)}

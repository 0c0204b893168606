"""Option ``memory``: choose a recipe whose predicted peak memory is below a limit, without running a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gradgraph.chat.chat_batches import ChatBatches
from gradgraph.chat.chat_recipe import RANK, Recipe
from gradgraph.chat.preferences import TARGET, PairBatches
from gradgraph.errors import DataError, readable_bytes
from gradgraph.machine.free_memory import resident_memory
from gradgraph.runtime.execution.memory import Prediction, SessionMemory
from gradgraph.runtime.loop.sizing import limit_of
from gradgraph.step.step import Step
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS

PROCESS = 250 << 20  # bytes of the interpreter with libraries and graphs (210 were measured), without sessions
BEFORE = 150 << 20  # of these, bytes before planning (120 were measured), unless there are many data
GRAIN = 16 << 20  # bytes to which further memory before planning is rounded up, so that equal runs are planned alike
WORKSPACES = 0.05  # of the prediction: temporary buffers of kernels (at most 4 % were measured)
LEAST_RANK = 4  # minimum rank chosen automatically: a lower one learns less and saves little
LEAST_TOKENS = 512  # minimum batch tried before recomputation: smaller matrix products are slow
SHORTEST = 32  # minimum row length chosen automatically
CHOSEN = ("rank", "batch_size", "accumulate", "recompute", "length")  # options that a plan sets


Batches = ChatBatches | PairBatches


@dataclass(frozen=True)
class Prepared:
    """Data prepared for a run.

    Attributes:
        train, held_out: batches; ``held_out`` is None without validation data.
        longest: the number of tokens of the longest row of a batch, with padding.
        figures: the numbers of rows and tokens, for the model card.
        digest: SHA-256 of all tokens.
    """

    train: Batches
    held_out: Batches | None
    longest: int
    figures: Mapping[str, int]
    digest: str


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
        keeps_best: whether a copy of the best state is kept, for early stopping.
        keeps_features: whether only the head is trained, which has an evaluation session of its own.
    """

    first: Shape
    others: tuple[Shape, ...] = ()
    evaluated: tuple[Shape, ...] = ()
    predicted: tuple[Shape, ...] = ()
    merges: int = 0
    keeps_best: bool = False
    keeps_features: bool = False

    @classmethod
    def of(cls, recipe: Recipe, data: Prepared, refers: bool, sampled: int, merges: int) -> Use:
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
        sessions = _largest(others), _largest(evaluated), _largest(predicted)
        return cls(first, *sessions, merges, recipe.patience is not None, recipe.keep_features)


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
    def spare(self) -> int:
        """The bytes of the memory limit that the run is not predicted to use."""
        return _limit(self.recipe) - self.bytes

    @property
    def told(self) -> str:
        """The chosen options, as text."""
        r = self.recipe
        rank = [f"adapters of rank {r.rank}"] if KINDS[r.kind].has_rank else []
        steps = f"gradients accumulated over {r.accumulate} batches" if r.accumulate > 1 else "an update after each"
        again = "activations recomputed" if r.recompute else "no recomputation"
        cut = [f"at most {r.length} tokens per row"] if r.length is not None else []
        return ", ".join((*rank, f"batches of {r.batch_size}", steps, again, *cut))


def planned(
    recipe: Recipe,
    data: Prepared,
    prepare: Callable[[Recipe], Prepared],
    build: Callable[[Recipe, Prepared], Step],
    sampled: int = 0,
    merges: int = 0,
    began: Mapping[str, Any] | None = None,
) -> tuple[Plan, Prepared]:
    """Choose a recipe that fits the memory limit; return its plan and its data.

    A resumed run keeps the recipe that was chosen when it began.

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
        began: the recorded options of a resumed run.

    Raises:
        DataError: no recipe fits.
    """
    search, lower = _Search(_limit(recipe), build, sampled, merges), _lower_ranks(recipe)
    if began is not None and (chosen := _chosen_before(recipe, began, data.longest)) is not None:
        data = data if chosen.length == recipe.length else prepare(chosen)
        if search.fits(chosen, data) is None and search.least.spare < -GRAIN:
            raise _no_longer(search.least)
        return search.least, data
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


class _Search:
    """A search over plans for the first within ``limit`` bytes; keeps the smallest plan, for the message."""

    def __init__(self, limit: int, build: Callable[[Recipe, Prepared], Step], sampled: int, merges: int) -> None:
        self._limit, self._build, self._sampled, self._merges = limit, build, sampled, merges
        self._process = _process()
        self._steps: dict[tuple[int | None, ...], Prediction] = {}
        self._least: Plan | None = None

    @property
    def least(self) -> Plan:
        assert self._least is not None  # there is at least one
        return self._least

    def first(self, recipe: Recipe, data: Prepared) -> Plan | None:
        """Return the plan of the first variant of a recipe (batch size, recomputation) that fits, else None."""
        self._steps.clear()  # they belong to other data or a different rank
        return next((plan for one in _ways(recipe, data.longest) if (plan := self.fits(one, data))), None)

    def fits(self, recipe: Recipe, data: Prepared) -> Plan | None:
        """Return the plan of a recipe if its predicted memory is within the limit, otherwise None."""
        kind = recipe.rank, recipe.recompute, recipe.accumulate > 1
        if kind not in self._steps:
            self._steps[kind] = Prediction.here(self._build(recipe, data), None, {})
        step = self._steps[kind]
        use = Use.of(recipe, data, _refers(step, recipe), self._sampled, self._merges)
        plan = Plan(recipe, predicted(step, use, self._process))
        if self._least is None or plan.bytes < self._least.bytes:
            self._least = plan
        return plan if plan.bytes <= self._limit else None


def _refers(step: Prediction, recipe: Recipe) -> bool:
    """Whether the log-probabilities of all pairs are computed before training."""
    return recipe.prefers and any(spec.name == TARGET for spec in step.session.manifest.targets)


def _limit(recipe: Recipe) -> int:
    limit = limit_of(f"auto:{recipe.memory}")
    assert limit is not None  # the recipe sets ``memory``
    return limit


def _chosen_before(recipe: Recipe, began: Mapping[str, Any], longest: int) -> Recipe | None:
    """Return the recipe chosen from ``recipe`` when a run began; None if the run began with another recipe."""
    ranks = recipe.settled.rank, *_lower_ranks(recipe)
    found = (one for shorter in _lengths(recipe, longest) for rank in ranks if rank is not None
             for one in _ways(shorter.settled.of_rank(rank), longest))  # fmt: skip
    return next((one for one in found if all(getattr(one, name) == began.get(name) for name in CHOSEN)), None)


def _no_longer(plan: Plan) -> DataError:
    """Return the error for a resumed run whose recipe does not fit, such as with a longer sample."""
    return DataError(
        f"the run to resume began with {plan.told}, which now requires {readable_bytes(plan.bytes)}, but memory is "
        f"{plan.recipe.memory}; resume it with the samples and kernels with which it began, or start a new run in "
        "another folder"
    )


def _too_little(recipe: Recipe, least: Plan) -> DataError:
    """Return the error for a limit that no recipe fits, with all remedies."""
    way = "drop" if recipe.prefers else "cut"  # truncated answers cannot be compared
    given = KINDS[recipe.kind].has_rank and recipe.rank is not None and recipe.rank > LEAST_RANK
    longer = "" if _shortens(recipe) else f", or {'drop' if way == 'drop' else 'truncate'} longer rows with "
    adapt = f"raise it, {'lower the rank, ' if given else ''}or adapt fewer layers with "
    return DataError(
        f"the smallest plan ({least.told}) requires {readable_bytes(least.bytes)}, but memory is {recipe.memory}",
        remedy=f"{adapt}target=" + (longer and f"{longer}long='{way}'"),
        shell=f"{adapt}--target" + (longer and f"{longer}--long {way}"),
    )


def _process() -> int:
    """Return the bytes of the process without sessions; more than ``PROCESS`` with many data, or after other work."""
    further = max((resident_memory() or 0) - BEFORE, 0)
    return PROCESS + -(-further // GRAIN) * GRAIN


def predicted(step: Prediction, use: Use, process: int = PROCESS) -> int:
    """Return the peak memory of a run of ``step`` in bytes, including pages of mapped files.

    ``process`` are the bytes of the process without sessions.

    Training sessions are closed before layers are merged, one at a time; merged weights are in a file whose pages do
    not stay in memory. The model to merge contains the initial values of the adapters.
    """
    first = _sizes(step, use.first)
    memory = step.at(first).memory

    def largest(kind: str, batches: Iterable[Shape]) -> SessionMemory:
        found = (getattr(step.at(_sizes(step, batch)), kind) for batch in batches)
        return max(found, key=lambda one: one.total, default=SessionMemory(0, 0, 0))

    others = [batch for batch in use.others if _sizes(step, batch) != first]
    evaluation = largest("evaluation", use.evaluated)
    further = [largest("training", others), evaluation, largest("prediction", use.predicted)]
    further += [evaluation] * use.keeps_features
    temporary = memory.peak + memory.gaps + sum(one.temporary for one in further)
    sessions = memory.session + sum(one.graph + one.weights for one in further)
    current = memory.weights + memory.optimizer
    training = memory.batch + sessions + round((1 + WORKSPACES) * temporary) + current * use.keeps_best
    merging = 0
    if use.merges:  # needs the graph of the merged model, and first a copy of the state, then of the adapters
        each = memory.weights + use.merges
        measured = evaluation.temporary + evaluation.graph
        merging = memory.session + max(current, each, measured)
    return process + memory.weights + current + memory.following + memory.frozen + max(training, merging)


def _lengths(recipe: Recipe, longest: int) -> Iterator[Recipe]:
    """Yield the recipe and, if rows may be shortened, recipes with half the tokens, a quarter, and so on."""
    yield recipe
    while _shortens(recipe) and longest // 2 >= SHORTEST:
        longest //= 2
        yield replace(recipe, length=longest)


def _shortens(recipe: Recipe) -> bool:
    """Whether rows may be cut or dropped; answers that are compared are not cut."""
    return recipe.long == "drop" or (recipe.long == "cut" and not recipe.prefers)


def _lower_ranks(recipe: Recipe) -> list[int]:
    """Return the default rank halved once, twice, and so on; empty if the recipe sets a rank or has none."""
    if recipe.rank is not None or not KINDS[recipe.kind].has_rank:
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


def _sizes(step: Prediction, batch: Shape) -> dict[str, int]:
    """Return the sizes of a step's symbolic dimensions, by name: rows per batch, and tokens per row."""
    shape = step.session.manifest.inputs[0].shape
    return {name: size for name, size in ((shape[0], batch.rows), (shape[-1], batch.tokens)) if isinstance(name, str)}

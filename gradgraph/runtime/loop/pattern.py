"""Schedules of several named steps over the batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradgraph.arguments import WHOLE, described
from gradgraph.errors import BuildError, DataError, UnknownNameError, shown, suggestion


@dataclass(frozen=True)
class Pattern:
    """The order in which named steps train on each batch.

    Attributes:
        steps: the steps of a batch, in order; repetitions are allowed.
        every: step → n, if it trains on every n-th batch only.
    """

    steps: tuple[str, ...]
    every: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(f"{s}/{self.every[s]}" if self.every.get(s, 1) > 1 else s for s in self.steps)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.steps))

    def on(self, number: int) -> list[str]:
        """Return the steps that train on batch ``number``."""
        return [name for name in self.steps if (number + 1) % self.every.get(name, 1) == 0]

    def runs(self, name: str, start: int, stop: int) -> int:
        """Return how often a step runs on batches ``start`` to ``stop`` (exclusive)."""
        every = self.every.get(name, 1)
        return self.steps.count(name) * (stop // every - start // every)


def pattern_of(
    known: Sequence[str], steps: str | Sequence[str] | None, every: Mapping[str, int] | None
) -> Pattern | None:
    """Return the pattern for the arguments of ``fit``: by default all steps in order; None for a single step.

    Raises:
        UnknownNameError: there is no such step.
        DataError: no step trains on every batch, or a value of ``every`` is not a positive integer.
        BuildError: the step folder has a single step.
    """
    if not known:
        if steps is not None or every is not None:
            raise BuildError(
                "this step folder has one step, and steps and every choose among several; leave them out",
                shell="this step folder has one step, and --every chooses among several; leave it out",
            )
        return None
    chosen = tuple(known) if steps is None else (steps,) if isinstance(steps, str) else tuple(steps)
    every = dict(every or {})
    for name in (*chosen, *every):
        if name not in known:
            raise UnknownNameError(f"there is no step '{shown(name)}'{suggestion(str(name), known)}")
    for name, number in every.items():
        if not WHOLE.fits(number) or number < 1:
            raise DataError(f"every['{shown(name)}'] must be a whole number above zero, but is {described(number)}")
        if name not in chosen:
            raise DataError(f"every names the step '{shown(name)}', which is not among the steps of this fit")
    if not chosen or all(every.get(name, 1) > 1 for name in chosen):
        raise DataError("no step trains on every batch; leave one of the steps out of every")
    return Pattern(chosen, {name: int(number) for name, number in every.items()})

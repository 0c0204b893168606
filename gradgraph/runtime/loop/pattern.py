"""The order in which several named steps train on each batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradgraph.arguments import WHOLE, described
from gradgraph.errors import BuildError, DataError, UnknownNameError, shown, suggestion


@dataclass(frozen=True)
class Pattern:
    """The order in which named steps train on each batch.

    Attributes:
        steps: the steps that train on a batch, in order; repetitions are allowed.
        every: step → n, for steps that train only on every n-th batch.
    """

    steps: tuple[str, ...]
    every: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(f"{s}/{self.every[s]}" if self.every.get(s, 1) > 1 else s for s in self.steps)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the steps, without repetitions."""
        return tuple(dict.fromkeys(self.steps))

    def on(self, number: int) -> list[str]:
        """Return the steps that train on batch ``number``."""
        return [name for name in self.steps if (number + 1) % self.every.get(name, 1) == 0]

    def runs(self, name: str, start: int, stop: int) -> int:
        """Return how often the step ``name`` runs on batches ``start`` to ``stop`` (exclusive)."""
        every = self.every.get(name, 1)
        return self.steps.count(name) * (stop // every - start // every)


def pattern_of(
    known: Sequence[str], steps: str | Sequence[str] | None, every: Mapping[str, int] | None
) -> Pattern | None:
    """Return the pattern for the arguments of ``fit``: by default all steps in order; None for a single step.

    Raises:
        UnknownNameError: if a step in ``steps`` or ``every`` does not exist.
        DataError: if no step trains on every batch, or a value of ``every`` is not a positive integer.
        BuildError: if ``steps`` or ``every`` is given for a step folder with a single step.
    """
    if not known:
        if steps is not None or every is not None:
            raise BuildError(
                "the arguments steps and every are for step folders with several steps, and this one has a single "
                "step; remove them",
                shell="--every is for step folders with several steps, and this one has a single step; remove it",
            )
        return None
    chosen = tuple(known) if steps is None else (steps,) if isinstance(steps, str) else tuple(steps)
    every = dict(every or {})
    for name in (*chosen, *every):
        if name not in known:
            raise UnknownNameError(f"there is no step '{shown(name)}'{suggestion(str(name), known)}")
    for name, number in every.items():
        if not WHOLE.fits(number) or number < 1:
            raise DataError(f"every['{shown(name)}'] is {described(number)}; it should be a whole number above zero")
        if name not in chosen:
            raise DataError(
                f"the argument every has a value for the step '{shown(name)}', which this fit does not train; remove "
                "this value"
            )
    if not chosen or all(every.get(name, 1) > 1 for name in chosen):
        raise DataError(
            "no step trains on every batch",
            remedy="train at least one step without a value in the argument every",
            shell="omit --every for at least one step",
        )
    return Pattern(chosen, {name: int(number) for name, number in every.items()})

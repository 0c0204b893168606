"""Hyperparameter values that ``fit`` passes to each step: constants, functions of the step, or ``Plateau`` rules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from gradgraph.arguments import NUMBER, described
from gradgraph.errors import DataError, shown
from gradgraph.optim.plateau import Plateau
from gradgraph.runtime.execution.rates import can_be_fed, range_of
from gradgraph.runtime.saved.record import Progress
from gradgraph.step.manifest import BATCH_WEIGHT, LEARNING_RATE, UPDATE, Manifest, column

log = logging.getLogger("gradgraph")

Rate: TypeAlias = float | Callable[[int], float] | Plateau


def last_rates(manifest: Manifest, progress: Progress) -> dict[str, float]:
    """Return the hyperparameters of the last step by history column, including rates of schedules in the graph."""
    defaults = {column(s, n): value for s, p in manifest.parts.items() for n, value in p.hyperparameters.items()}
    known = defaults | progress.hyperparameters
    return {name: value for name, value in known.items() if name.rpartition(".")[2] not in (UPDATE, BATCH_WEIGHT)}


class MovingRates:
    """The hyperparameters of a fit, with a value for each step.

    Attributes:
        rates: numbers, functions of the step, or Plateaus, by name.
        are_functions: whether any is a function, so that its value may change in each step.
    """

    def __init__(self, rates: Mapping[str, Rate]) -> None:
        self.rates = rates
        self.are_functions = any(callable(rate) for rate in rates.values())
        self._was_zero = set[str]()
        self._said = set[str]()

    def at(self, name: str, done: int, history: Mapping[str, Sequence[float]]) -> float:
        """Return the value of the hyperparameter ``name`` for the next step, after ``done`` steps with this history.

        Raises:
            DataError: if a function returns a non-finite number or a negative learning rate.
        """
        rate = self.rates[name]
        if isinstance(rate, Plateau):
            return rate.rate(history)
        if not callable(rate):
            return float(rate)
        value = rate(done)
        if not NUMBER.fits(value) or not can_be_fed(name, float(value)):
            raise DataError(f"the function of {shown(name)} returned {described(value)} after {done} steps; it should "
                            f"return {range_of(name)}")  # fmt: skip
        if name.rpartition(".")[2] == LEARNING_RATE and name not in self._said:
            self._say_if_zero(name, float(value), done)
        return float(value)

    def _say_if_zero(self, name: str, value: float, done: int) -> None:
        """Warn once if the function of the learning rate ``name`` returns 0 after ``done`` steps and the step before.

        A single 0 is normal: a warm-up may start there.
        """
        if value == 0 and name in self._was_zero:
            self._said.add(name)
            log.warning(
                "the function of %s returned 0 after %d steps, so the weights no longer change", shown(name), done
            )
        (self._was_zero.add if value == 0 else self._was_zero.discard)(name)

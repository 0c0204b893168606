"""The hyperparameters of a step: scalar inputs with default values, which the sessions read where they lie."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnxruntime as ort

from gradgraph.arguments import NUMBER, meant
from gradgraph.errors import DataError, UnknownNameError, shown
from gradgraph.runtime.execution.ort_values import to_ortvalue
from gradgraph.step.manifest import LEARNING_RATE

LARGEST = float(np.finfo(np.float32).max)


def can_be_fed(name: str, value: float) -> bool:
    """Whether a hyperparameter may have this value: a finite float32, and no learning rate below 0."""
    return abs(value) <= LARGEST and (value >= 0 or not _is_rate(name))


def range_of(name: str) -> str:
    """The values that a hyperparameter may have, in words."""
    return "a finite number of 0 or more" if _is_rate(name) else "a finite number"


def _is_rate(name: str) -> bool:
    return name.rpartition(".")[2] == LEARNING_RATE


class Rates:
    """The values that steps are fed.

    Attributes:
        defaults: the value of each where none is given.
        given: what was last written; None makes the next step write anew.
    """

    def __init__(self, defaults: Mapping[str, float]) -> None:
        self.given: dict[str, float] | None = None
        self.defaults = defaults
        self._arrays = {name: np.array(value, np.float32) for name, value in defaults.items()}

    @functools.cached_property
    def constants(self) -> dict[str, ort.OrtValue]:
        """OrtValues over the memory that :meth:`write` writes to."""
        return {name: to_ortvalue(array) for name, array in self._arrays.items()}

    def write(self, given: Mapping[str, float]) -> dict[str, float]:
        """Write those given, and the defaults for the rest; returns all of them.

        Raises:
            UnknownNameError: the step has no such hyperparameter.
            DataError: one is not finite in float32, or a learning rate is negative.
        """
        self.check_names(given)
        for name, number in given.items():
            NUMBER.check(f"the hyperparameter '{shown(name)}'", number)
        values = {name: float(given.get(name, default)) for name, default in self.defaults.items()}
        for name, value in values.items():
            if not can_be_fed(name, value):  # the state would be lost, and only the next loss would tell
                raise DataError(f"the hyperparameter '{shown(name)}' is {value}; give {range_of(name)}")
        for name, value in values.items():
            self._arrays[name][...] = value
        self.given = dict(given)
        return values

    def check_names(self, given: Iterable[str], function: Callable[..., object] | None = None) -> None:
        """Raise UnknownNameError unless the step has all of these; an argument of ``function`` may have been meant."""
        for name in given:
            if name not in self.defaults:
                arguments = [] if function is None else inspect.signature(function).parameters
                known = [*self.defaults, *(a for a in arguments if a not in ("self", "hyperparameters", name))]
                raise UnknownNameError(
                    f"the step takes no hyperparameter '{shown(name)}' (a schedule in the graph needs none)"
                    f"{meant(name, known)}"
                )

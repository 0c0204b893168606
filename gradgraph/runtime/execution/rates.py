"""The hyperparameters of a step: scalar inputs with default values, in memory that the sessions read directly."""

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
    """Whether ``value`` is valid for the hyperparameter: finite in float32, and not negative for a learning rate."""
    return abs(value) <= LARGEST and (value >= 0 or not _is_rate(name))


def range_of(name: str) -> str:
    """Return a description of the valid values of a hyperparameter, for messages."""
    return "a finite number of 0 or more" if _is_rate(name) else "a finite number"


def _is_rate(name: str) -> bool:
    return name.rpartition(".")[2] == LEARNING_RATE


class Rates:
    """The current values of a step's hyperparameters.

    Attributes:
        defaults: the default value of each hyperparameter.
        given: the values passed to the last :meth:`write`; set to None to make the next step write its values again.
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
        """Write the ``given`` values, and defaults for the other hyperparameters; return all values.

        Raises:
            UnknownNameError: if the step does not have a hyperparameter of this name.
            DataError: if a value is not finite in float32, or a learning rate is negative.
        """
        self.check_names(given)
        for name, number in given.items():
            NUMBER.check(f"the hyperparameter '{shown(name)}'", number)
        values = {name: float(given.get(name, default)) for name, default in self.defaults.items()}
        for name, value in values.items():
            if not can_be_fed(name, value):  # otherwise it would ruin the weights, noticed only at the next loss
                raise DataError(f"the hyperparameter '{shown(name)}' is {value}; give {range_of(name)}")
        for name, value in values.items():
            self._arrays[name][...] = value
        self.given = dict(given)
        return values

    def check_names(self, given: Iterable[str], function: Callable[..., object] | None = None) -> None:
        """Raise UnknownNameError if the step does not have one of these hyperparameters.

        The message suggests similar names, including arguments of ``function``.
        """
        for name in given:
            if name not in self.defaults:
                arguments = [] if function is None else inspect.signature(function).parameters
                known = [*self.defaults, *(a for a in arguments if a not in ("self", "hyperparameters", name))]
                raise UnknownNameError(
                    f"the step has no hyperparameter '{shown(name)}' (it cannot be passed if it follows a schedule)"
                    f"{meant(name, known)}"
                )

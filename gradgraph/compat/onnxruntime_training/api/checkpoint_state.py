"""The training state: parameters, gradients, optimizer moments, and user-defined properties.

A nominal checkpoint contains the names of the parameters without values. A state loaded from it is nominal until values
are set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gradgraph.arguments import FLAG, PATH, checked
from gradgraph.compat.onnxruntime_training.api.training_state import Array, Held, TrainingState
from gradgraph.compat.onnxruntime_training.saved.checkpoint_file import Property, read_checkpoint, write_checkpoint
from gradgraph.errors import shown
from gradgraph.runtime.execution.ort_values import fetched

_WIDEST = 2**63


class Parameter:
    """A parameter of a ``CheckpointState``."""

    def __init__(self, parameter: Held, state: TrainingState) -> None:
        self._parameter = parameter
        self._state = state

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self._parameter.name

    @property
    def data(self) -> Array:
        """A copy of the parameter's values; an assigned array must have the same shape and element type."""
        return self._state.read(self._parameter)

    @data.setter
    def data(self, value: Array) -> None:
        self._state.write(self._parameter, value)

    @property
    def grad(self) -> Array | None:
        """A copy of the parameter's gradient; None before a module is created, and for frozen parameters."""
        gradient = self._parameter.gradient
        return None if gradient is None else fetched(gradient, self._parameter.dtype)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained."""
        return self._parameter.requires_grad

    def __repr__(self) -> str:
        return f"Parameter(name={self.name}, requires_grad={self.requires_grad})"


class _ByName:
    """A mapping from names to the parameters or properties of a state."""

    _kind: str

    def __init__(self, state: TrainingState, held: Mapping[str, Any]) -> None:
        self._state, self._held = state, held

    def _found(self, name: str) -> Any:
        if name not in self._held:
            raise KeyError(f"{self._kind} {name} not found.")
        return self._held[name]

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)


class Parameters(_ByName):
    """The parameters of a ``CheckpointState`` by name; iteration yields pairs of name and parameter, sorted by name."""

    _kind = "Parameter"

    def __getitem__(self, name: str) -> Parameter:
        """Return a parameter; raise KeyError if there is no parameter of this name."""
        return Parameter(self._found(name), self._state)

    def __setitem__(self, name: str, value: Array) -> None:
        self[name].data = value

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        for name in self._held:
            yield name, self[name]

    def __repr__(self) -> str:
        return f"Parameters({', '.join(map(shown, self._held))})"


class Properties(_ByName):
    """User-defined properties, stored in checkpoints; iteration yields pairs of name and value, sorted by name."""

    _kind = "Property"

    def __getitem__(self, name: str) -> Property:
        """Return a property; raise KeyError if there is no property of this name."""
        found: Property = self._found(name)
        return found

    def __setitem__(self, name: str, value: Property) -> None:
        """Set a property to a 64-bit int, a float (stored in 32 bits) or a str; raise TypeError for another type."""
        self._state.properties[name] = _kept(value)

    def __iter__(self) -> Iterator[tuple[str, Property]]:
        yield from sorted(self._held.items())

    def __repr__(self) -> str:
        return f"Properties({', '.join(f'{shown(n)}={v!r}' for n, v in self)})"


def _kept(value: Any) -> Property:
    """Return a property as it will be stored in a file: a float is rounded to float32."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int | np.integer) and -_WIDEST <= int(value) < _WIDEST:
        return int(value)
    if isinstance(value, int | float | np.number) and not isinstance(value, np.complexfloating):
        with np.errstate(over="ignore"):
            return float(np.float32(value))
    raise TypeError(f"a property must be an int, a float or a str, not {type(value).__name__}")


class CheckpointState:
    """The training state. Use ``CheckpointState.load_checkpoint`` to create one.

    Args:
        state: the contents of a checkpoint file.
    """

    def __init__(self, state: TrainingState) -> None:
        if not isinstance(state, TrainingState):
            raise TypeError(f"Invalid argument for CheckpointState received {type(state)}")
        self._state = state
        self._parameters = Parameters(state, state.parameters)
        self._properties = Properties(state, state.properties)

    @classmethod
    @checked(checkpoint_uri=PATH)
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> CheckpointState:
        """Load a checkpoint file, complete or nominal, which was written by this package or onnxruntime-training.

        Raises:
            CheckpointError: if the file does not exist, or is damaged.
        """
        return cls(TrainingState.of(read_checkpoint(checkpoint_uri)))

    @classmethod
    @checked(checkpoint_uri=PATH, include_optimizer_state=FLAG)
    def save_checkpoint(
        cls, state: CheckpointState, checkpoint_uri: str | os.PathLike[str], include_optimizer_state: bool = False
    ) -> None:
        """Write a checkpoint file, atomically, in the format of onnxruntime-training.

        Args:
            state: the state to save.
            checkpoint_uri: the path of the file.
            include_optimizer_state: whether to include the number of updates and the moments.

        Raises:
            CompatibilityError: if the state is nominal.
            OutputError: if the file cannot be written.
        """
        write_checkpoint(state._state.checkpoint(include_optimizer_state), checkpoint_uri)

    @property
    def parameters(self) -> Parameters:
        """The parameters by name."""
        return self._parameters

    @property
    def properties(self) -> Properties:
        """The user-defined properties."""
        return self._properties

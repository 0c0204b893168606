"""The training state in device memory: parameters with gradients and moments, and properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import onnxruntime as ort

from gradgraph.compat.onnxruntime_training.saved.checkpoint_file import Checkpoint, OptimizerGroup, Property
from gradgraph.errors import CompatibilityError, shown
from gradgraph.runtime.execution.ort_values import fetched, fill, on_device
from gradgraph.runtime.execution.session import Placement

Array = np.ndarray[Any, Any]
CPU = Placement(("CPUExecutionProvider",))
A = TypeVar("A")
B = TypeVar("B")


@dataclass
class Held:
    """A parameter of the training state.

    Attributes:
        requires_grad: whether the parameter is trained.
        value: the value; None while the state is nominal.
        gradient: the accumulated gradient; None before a module is created, and for frozen parameters.
        is_constant: whether the value is a constant of the training model, and so cannot be changed.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    requires_grad: bool
    value: ort.OrtValue | None
    gradient: ort.OrtValue | None = None
    is_constant: bool = False

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass
class TrainingState:
    """The state shared by a module and an optimizer.

    Attributes:
        parameters: the parameters by name.
        groups: the optimizer states by name.
        properties: the user-defined properties.
        nominal: whether the parameters have no values yet.
        placement: the device of the tensors.
    """

    parameters: dict[str, Held]
    groups: dict[str, OptimizerGroup[ort.OrtValue]]
    properties: dict[str, Property]
    nominal: bool
    placement: Placement = field(default=CPU)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> TrainingState:
        parts = ((checkpoint.trained, True), (checkpoint.frozen, False))
        held = {
            name: Held(name, array.dtype, array.shape, trains, None if checkpoint.nominal else placed(array, CPU))
            for arrays, trains in parts
            for name, array in arrays.items()
        }
        groups = {
            name: OptimizerGroup(g.step, g.initial_lr, _mapped(g.moments, lambda _, array: placed(array, CPU)))
            for name, g in checkpoint.groups.items()
        }
        return cls(dict(sorted(held.items())), groups, dict(checkpoint.properties), checkpoint.nominal)

    def checkpoint(self, with_optimizer: bool) -> Checkpoint:
        """Return the contents of a checkpoint file.

        Raises:
            CompatibilityError: if the state is nominal.
        """
        trained, frozen = (
            {h.name: self.read(h) for h in self.parameters.values() if h.requires_grad is trains}
            for trains in (True, False)
        )
        groups = {}
        for name, g in self.groups.items() if with_optimizer else ():
            moments = _mapped(g.moments, lambda p, value: fetched(value, self.parameters[p].dtype))
            groups[name] = OptimizerGroup(g.step, g.initial_lr, moments)
        return Checkpoint(trained, frozen, groups, dict(self.properties))

    def read(self, held: Held) -> Array:
        """Return a copy of a parameter."""
        return fetched(self.filled(held), held.dtype)

    def filled(self, held: Held) -> ort.OrtValue:
        """Return the value of a parameter.

        Raises:
            CompatibilityError: if the state is nominal.
        """
        if self.nominal or held.value is None:
            raise CompatibilityError(
                "the checkpoint is nominal and has no values; fill it first: "
                "module.copy_buffer_to_parameters(buffer, trainable_only=False)"
            )
        return held.value

    def write(self, held: Held, array: Array) -> None:
        """Set a parameter.

        Raises:
            CompatibilityError: if the state is nominal, if ``array`` has a different shape or element type from the
                parameter, or if the parameter is a constant of the training model.
        """
        self.filled(held)
        given = np.asarray(array)
        if given.shape != held.shape or given.dtype != held.dtype:
            raise CompatibilityError(
                f"parameter '{shown(held.name)}' is {held.dtype} of shape {list(held.shape)}, but got {given.dtype} "
                f"of shape {list(given.shape)}; convert it"
            )
        if held.is_constant and not np.array_equal(given, self.read(held), equal_nan=True):
            raise CompatibilityError(
                f"the value of '{shown(held.name)}' is a constant of the training model; generate the artifacts again "
                "from a model with the new value"
            )
        held.value = placed(given, self.placement)

    def move_to(self, placement: Placement) -> None:
        """Move all tensors to a device."""
        self.placement = placement
        if placement.memory == "cpu":
            return
        for held in self.parameters.values():
            if held.value is not None:
                held.value = placed(self.read(held), placement)

    def trained(self) -> list[Held]:
        return [h for h in self.parameters.values() if h.requires_grad]


def _mapped(moments: Mapping[str, Mapping[str, A]], change: Callable[[str, A], B]) -> dict[str, dict[str, B]]:
    return {p: {slot: change(p, value) for slot, value in row.items()} for p, row in moments.items()}


def placed(array: Array, placement: Placement) -> ort.OrtValue:
    """Return a copy of ``array`` in device memory that onnxruntime owns, so that views of it stay valid."""
    value = on_device(array.shape, array.dtype, placement.memory, placement.device_id)
    fill(value, array)
    return value


def zeros(shape: Sequence[int], dtype: np.dtype[Any], placement: Placement) -> ort.OrtValue:
    return placed(np.zeros(shape, dtype), placement)

"""The state of a training run, kept on the device between steps.

There are two sets of tensors: a step reads one and writes the other, then they change places. Binding one tensor as
input and output of the same run is not safe: the result would depend on the order in which nodes happen to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnxruntime as ort

from gradgraph.errors import CheckpointError, shown
from gradgraph.manifest import StateSpec, numpy_dtype
from gradgraph.runtime.session import Placement, to_ortvalue

ALIGNMENT = 64  # bytes: one cache line, one AVX512 register


class Tensor:
    """A state tensor in the memory of the device."""

    def __init__(self, spec: StateSpec, placement: Placement) -> None:
        shape = tuple(int(d or 0) for d in spec.shape)
        dtype = numpy_dtype(spec.dtype)
        self._array = aligned_empty(shape, dtype) if placement.memory == "cpu" else None
        if self._array is not None:
            self.value = to_ortvalue(self._array)
        else:
            self.value = ort.OrtValue.ortvalue_from_shape_and_type(shape, dtype, "cuda", placement.device_id)

    def read(self) -> np.ndarray[Any, Any]:
        """A copy in host memory."""
        return np.array(self.value.numpy()) if self._array is None else self._array.copy()

    def write(self, array: np.ndarray[Any, Any]) -> None:
        if self._array is None:
            self.value.update_inplace(np.ascontiguousarray(array))
        else:
            self._array[...] = array


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """``np.empty`` on a cache-line boundary."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    block = np.empty(size + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + size].view(dtype).reshape(shape)


class State:
    """Every state tensor of a step, current and next. Memory for the next values is taken when training begins."""

    def __init__(self, specs: Iterable[StateSpec], placement: Placement) -> None:
        self.specs = {s.name: s for s in specs}
        self.on_cpu = placement.memory == "cpu"
        self.side = 0
        self._placement = placement
        self._sides = [{name: Tensor(s, placement) for name, s in self.specs.items()}]

    def values(self, side: int) -> dict[str, ort.OrtValue]:
        """The OrtValues of one of the two sets."""
        if side == len(self._sides):
            self._sides.append({name: Tensor(s, self._placement) for name, s in self.specs.items()})
        return {name: tensor.value for name, tensor in self._sides[side].items()}

    def swap(self) -> None:
        """What the last step wrote is current from now on."""
        self.side = 1 - self.side

    def read(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of the current values (of all tensors by default)."""
        current = self._sides[self.side]
        return {name: current[name].read() for name in (self.specs if names is None else names)}

    def write(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Replace every current value.

        Raises:
            CheckpointError: a tensor is missing, unknown, or of another shape or dtype; nothing was changed then.
        """
        check_values(self.specs, values)
        for name, tensor in self._sides[self.side].items():
            tensor.write(np.asarray(values[name]))


def check_values(specs: Mapping[str, StateSpec], values: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Raise CheckpointError unless ``values`` are exactly the state that ``specs`` describe."""
    for name in values:
        if name not in specs:
            raise CheckpointError(f"the state has the tensor '{shown(name)}', which this step does not know; load it "
                                  "into the step that it was saved from")  # fmt: skip
    for name, spec in specs.items():
        if name not in values:
            raise CheckpointError(f"the state lacks the tensor '{shown(name)}'; load one that this step has saved")
        value = np.asarray(values[name])
        if value.shape != spec.shape or value.dtype != numpy_dtype(spec.dtype):
            raise CheckpointError(
                f"'{shown(name)}' is {value.dtype}{list(value.shape)} in the state, but {spec.dtype}{list(spec.shape)} "
                "in this step; load it into the step that it was saved from"
            )

"""The state of a training run, kept on the device between steps.

There are two sets of tensors: a step reads one and writes the other, then they change places. Where several steps move
parts of one state, each moves some groups of tensors, and only these change places: ``side`` is a number with a bit for
each group. Binding one tensor as
input and output of the same run is not safe in general: the result would depend on the order in which nodes happen to
run. Tensors for which ``inplace.py`` proves that it does not may be members of both sets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import onnxruntime as ort

from gradgraph.errors import ModelError
from gradgraph.files.mapped import is_mapped, pieces
from gradgraph.runtime.data.batch import to_array
from gradgraph.runtime.execution.ort_values import fetched, fill, on_device, to_ortvalue
from gradgraph.runtime.execution.session import Placement
from gradgraph.runtime.saved.checkpoint import check_values
from gradgraph.step.manifest import StateSpec, numpy_dtype

ALIGNMENT = 64  # bytes: one cache line, one AVX512 register


class Tensor:
    """A state tensor in the memory of the device."""

    def __init__(self, spec: StateSpec, placement: Placement) -> None:
        shape = tuple(int(d or 0) for d in spec.shape)
        self._dtype = dtype = numpy_dtype(spec.dtype)
        self._array = aligned_empty(shape, dtype) if placement.memory == "cpu" else None
        if self._array is not None:
            self.value = to_ortvalue(self._array)
        else:
            self.value = on_device(shape, dtype, placement.memory, placement.device_id)

    def read(self) -> np.ndarray[Any, Any]:
        """A copy in host memory."""
        return fetched(self.value, self._dtype) if self._array is None else self._array.copy()

    def seen(self) -> np.ndarray[Any, Any]:
        """The memory itself where the host can read it, until the next step; else a copy."""
        return fetched(self.value, self._dtype) if self._array is None else self._array.view()

    def read_in(self, content: Iterable[memoryview]) -> None:
        """Take the bytes of a file, piece by piece; only where the host can write the memory."""
        assert self._array is not None
        flat, done = self._array.reshape(-1).view(np.uint8), 0
        for piece in content:
            flat[done : done + len(piece)] = piece
            done += len(piece)

    def write(self, array: np.ndarray[Any, Any]) -> None:
        if self._array is None:
            fill(self.value, array)
        elif is_mapped(array) and (array.shape, array.dtype) == (self._array.shape, self._dtype):
            self.read_in(pieces(array))
        else:
            self._array[...] = array


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """``np.empty`` on a cache-line boundary."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    block = np.empty(size + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + size].view(dtype).reshape(shape)


class State:
    """Every state tensor of a step, current and next. Memory for the next values is taken when training begins.

    Args:
        specs: the tensors.
        placement: where they lie.
        movers: the steps that move each of them; by default one moves all.

    Attributes:
        side: which of the two tensors is the current one: a bit for each group of tensors that the same steps move.
        absent: tensors that lie in other processes.
    """

    def __init__(
        self, specs: Iterable[StateSpec], placement: Placement, movers: Mapping[str, Collection[str]] | None = None
    ) -> None:
        self.specs = {s.name: s for s in specs}
        self.on_cpu = placement.memory == "cpu"
        self.side = 0
        self._placement = placement
        groups: dict[frozenset[str], int] = {}
        self._bits = {
            name: 1 << groups.setdefault(frozenset(movers[name] if movers else ()), len(groups)) for name in self.specs
        }
        self._first = {name: Tensor(s, placement) for name, s in self.specs.items()}
        self._second: dict[str, Tensor] = {}
        self.shared: frozenset[str] = frozenset()
        self._claimed: set[str] = set()
        self.lost = False  # a run failed after it may have written over shared tensors
        self.absent: frozenset[str] = frozenset()
        self._fetch: Callable[[list[str]], dict[str, np.ndarray[Any, Any]]] = lambda names: {}

    def share(self, names: Iterable[str], moved: Iterable[str]) -> None:
        """Let these tensors be the same in both sets: of those that a session moves, if none before it does."""
        new = set(names) - self._claimed
        self._claimed.update(moved)
        self._second |= {name: self._first[name] for name in new}
        self.shared |= new

    def leave(
        self, names: Iterable[str], fetch: Callable[[list[str]], dict[str, np.ndarray[Any, Any]]] | None = None
    ) -> None:
        """Give the memory of these tensors back: other processes have them, and ``fetch`` gives copies of some."""
        self.absent = frozenset(names)
        self._fetch = fetch or self._fetch
        for name in self.absent:
            self._first.pop(name, None)
            self._second.pop(name, None)

    def make_whole(self) -> None:
        """Take memory for all tensors again; the values of those that were absent are yet to be written."""
        self._first |= {name: Tensor(self.specs[name], self._placement) for name in self.absent}
        for name in self.absent & self.shared:
            self._second[name] = self._first[name]
        self.absent = frozenset()

    @property
    def here(self) -> list[str]:
        """The tensors that lie in this process."""
        return [name for name in self.specs if name not in self.absent]

    def bits(self, names: Iterable[str]) -> int:
        """The bits of ``side`` that stand for the groups of these tensors."""
        bits = 0
        for name in names:
            bits |= self._bits[name]
        return bits

    def _tensor(self, name: str, side: int) -> Tensor:
        if not side & self._bits[name]:
            return self._first[name]
        if name not in self._second:
            self._second[name] = Tensor(self.specs[name], self._placement)
        return self._second[name]

    def values(self, side: int) -> dict[str, ort.OrtValue]:
        """The OrtValues that are current when ``side`` is this."""
        return {name: self._tensor(name, side).value for name in self.here}

    def tensor_like(self, name: str) -> Tensor:
        """New memory of the shape and type of a state tensor."""
        return Tensor(self.specs[name], self._placement)

    def overwrite(self, name: str, tensor: Tensor) -> None:
        """Copy ``tensor`` over the current value of ``name``."""
        self.put(name, tensor.read())

    def put(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Copy ``array`` over the current value of ``name``."""
        self._tensor(name, self.side).write(array)

    def read_in(self, name: str, content: Iterable[memoryview]) -> None:
        """Let the current value of ``name`` be the bytes of a file; on the CPU only."""
        self._tensor(name, self.side).read_in(content)

    def swap(self, bits: int) -> None:
        """Make the values current that the last step wrote: those of its groups."""
        self.side ^= bits

    def undo(self, bits: int) -> None:
        """Go back to what the last step started from, which shared tensors cannot."""
        self.swap(bits)
        self.failed()

    def failed(self) -> None:
        """Note that a run has failed: with shared tensors, the state is then neither the old nor the new."""
        self.lost = bool(self.shared)

    def check(self) -> None:
        """Raise ModelError if the state was lost."""
        if self.lost:
            raise ModelError(
                "the last step failed while it wrote over the state; load a checkpoint, or train with in_place=False, "
                "which keeps the state of the step before"
            )

    def read(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of the current values (of all tensors by default); raises ModelError."""
        self.check()
        return self._each(names, Tensor.read)

    def seen(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """The current values, not copied where the host can read them: they change with the next step; ModelError."""
        self.check()
        return self._each(names, Tensor.seen)

    def _each(
        self, names: Iterable[str] | None, give: Callable[[Tensor], np.ndarray[Any, Any]]
    ) -> dict[str, np.ndarray[Any, Any]]:
        names = list(self.specs if names is None else names)
        far = [name for name in names if name in self.absent]
        fetched = self._fetch(far) if far else {}
        return {name: fetched[name] if name in fetched else give(self._tensor(name, self.side)) for name in names}

    def seen_for_use(self, names: Iterable[str], averages: Mapping[str, str]) -> dict[str, np.ndarray[Any, Any]]:
        """Return the current values as :meth:`seen`, with averages in place of the averaged tensors."""
        names = list(names)
        found = self.seen(averages.get(name, name) for name in names)
        return {name: found[averages.get(name, name)] for name in names}

    def go_back(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Write what ``read`` gave earlier of the tensors here; of others, nothing."""
        for name in self.here:
            self.put(name, values[name])
        self.lost = False

    def write(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Replace every current value.

        Raises:
            CheckpointError: a tensor is missing, unknown, or of another shape or dtype; nothing was changed then.
            DataError: NumPy cannot read one, or a mask hides values of it; likewise.
        """
        check_values(self.specs, values)
        self.make_whole()
        for name in self.specs:
            self._tensor(name, self.side).write(to_array(name, values[name]))
        self.lost = False

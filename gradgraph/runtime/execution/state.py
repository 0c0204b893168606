"""The state of a training run, kept on the device between steps.

There are two sets of tensors: a step reads one and writes the other, then the sets are swapped. If several named steps
update different groups of tensors, only the updated groups are swapped: ``side`` is an integer with one bit per group.

In general, one buffer must not be both input and output of a run, since the result would depend on the order in which
nodes run. Both sets share a tensor if ``inplace.py`` proves that this is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from gradgraph.data.arrays.batch import Array, to_array
from gradgraph.data.record.specs import numpy_dtype
from gradgraph.errors import ModelError
from gradgraph.files.external import is_external, is_packed
from gradgraph.files.float16_weights import widened
from gradgraph.files.mapped import is_mapped, pieces
from gradgraph.graph.prune import needed
from gradgraph.runtime.execution.frozen_weights import external_weights
from gradgraph.runtime.execution.ort_values import fetched, fill, on_device, to_ortvalue
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session, explained
from gradgraph.runtime.saved.checkpoint import check_values
from gradgraph.step.manifest import StateSpec
from gradgraph.step.step import Step

ALIGNMENT = 64  # bytes: one cache line, one AVX512 register


class Tensor:
    """A state tensor in device memory."""

    def __init__(self, spec: StateSpec, placement: Placement) -> None:
        shape = tuple(int(d or 0) for d in spec.shape)
        self._dtype = dtype = numpy_dtype(spec.dtype)
        self._array = aligned_empty(shape, dtype) if placement.memory == "cpu" else None
        if self._array is not None:
            self.value = to_ortvalue(self._array)
        else:
            self.value = on_device(shape, dtype, placement.memory, placement.device_id)

    def read(self) -> np.ndarray[Any, Any]:
        """Return a copy in host memory."""
        return fetched(self.value, self._dtype) if self._array is None else self._array.copy()

    def seen(self) -> np.ndarray[Any, Any]:
        """Return the value as a view of its memory, valid until the next step; a copy if the tensor is on a GPU."""
        return fetched(self.value, self._dtype) if self._array is None else self._array.view()

    def read_in(self, content: Iterable[memoryview]) -> None:
        """Fill the tensor with consecutive pieces of its bytes from a file; on the CPU only."""
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
    """Return an uninitialized array whose memory begins at a multiple of ``ALIGNMENT`` bytes."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    block = np.empty(size + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + size].view(dtype).reshape(shape)


class State:
    """The state tensors of a step: the current values, and memory for the next values, allocated when training begins.

    Args:
        movers: for each tensor, the named steps that update it; by default a single step updates all.

    Attributes:
        side: an integer with a bit per group of tensors updated by the same steps; the bit selects the set.
        shared: names of tensors whose memory both sets share.
        lost: whether a run failed that may have overwritten shared tensors.
        absent: names of tensors that other processes store.
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
        self.lost = False
        self.absent: frozenset[str] = frozenset()
        self._fetch: Callable[[list[str]], dict[str, np.ndarray[Any, Any]]] = lambda names: {}

    def share(self, names: Iterable[str], moved: Iterable[str]) -> None:
        """Let both sets share the memory of ``names``, unless an earlier session already updates them.

        ``moved`` are all tensors that this session updates.
        """
        new = set(names) - self._claimed
        self._claimed.update(moved)
        self._second |= {name: self._first[name] for name in new}
        self.shared |= new

    def leave(
        self, names: Iterable[str], fetch: Callable[[list[str]], dict[str, np.ndarray[Any, Any]]] | None = None
    ) -> None:
        """Free the memory of tensors that other processes store; ``fetch`` returns copies of these by name."""
        self.absent = frozenset(names)
        self._fetch = fetch or self._fetch
        for name in self.absent:
            self._first.pop(name, None)
            self._second.pop(name, None)

    def make_whole(self) -> None:
        """Allocate memory for absent tensors again; their values must then be written."""
        self._first |= {name: Tensor(self.specs[name], self._placement) for name in self.absent}
        for name in self.absent & self.shared:
            self._second[name] = self._first[name]
        self.absent = frozenset()

    @property
    def here(self) -> list[str]:
        """The names of the tensors that this process stores."""
        return [name for name in self.specs if name not in self.absent]

    def bits(self, names: Iterable[str]) -> int:
        """Return the mask of these tensors in ``side``: the bits of their groups, as for :meth:`swap`."""
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
        """Return the OrtValues of the set of tensors that ``side`` selects, by name."""
        return {name: self._tensor(name, side).value for name in self.here}

    def tensor_like(self, name: str) -> Tensor:
        """Return a new tensor with the shape and type of the state tensor ``name``; its memory is uninitialized."""
        return Tensor(self.specs[name], self._placement)

    def put(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Copy ``array`` over the current value of ``name``."""
        self._tensor(name, self.side).write(array)

    def read_in(self, name: str, content: Iterable[memoryview]) -> None:
        """Fill the current value of ``name`` with consecutive pieces of its bytes from a file; on the CPU only."""
        self._tensor(name, self.side).read_in(content)

    def swap(self, bits: int) -> None:
        """Make the values written by the last step current, for the groups with these ``bits``."""
        self.side ^= bits

    def undo(self, bits: int) -> None:
        """Swap back to the values before the last step; if tensors are shared, mark the state as lost instead."""
        self.swap(bits)
        self.failed()

    def failed(self) -> None:
        """Record a failed run: if sets share tensors, the state is lost, as a mixture of old and new values."""
        self.lost = bool(self.shared)

    def check(self) -> None:
        """Raise ModelError if the state was lost."""
        if self.lost:
            raise ModelError(
                "the last step failed while it overwrote the state; load a checkpoint, or train with in_place=False, "
                "which keeps the state of the step before"
            )

    def read(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Return copies of the current values, by default of all tensors; raise ModelError if the state was lost."""
        self.check()
        return self._each(names, Tensor.read)

    def seen(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Return the current values, by default of all tensors, as views that change with the next step.

        Tensors on a GPU are copied.

        Raises:
            ModelError: if the state was lost.
        """
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
        """Return current values by name, as views like :meth:`seen`, with moving averages for averaged tensors.

        ``averages`` maps each of these tensors to the state tensor with its average.
        """
        names = list(names)
        found = self.seen(averages.get(name, name) for name in names)
        return {name: found[averages.get(name, name)] for name in names}

    def go_back(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Restore values from an earlier :meth:`read`, for the tensors that this process stores."""
        for name in self.here:
            self.put(name, values[name])
        self.lost = False

    def write(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Replace every current value.

        Raises:
            CheckpointError: if a tensor is missing, unknown, or has a different shape or dtype. The state is unchanged.
            DataError: if NumPy cannot convert a value, or a mask hides elements of it. The state is unchanged.
        """
        check_values(self.specs, values)
        self.make_whole()
        for name in self.specs:
            self._tensor(name, self.side).write(to_array(name, values[name]))
        self.lost = False


# --- the initial state, computed by init.onnx ------------------------------------------------------------


def initial_state(step: Step, placement: Placement, options: RuntimeOptions) -> State:
    """Return the state tensors of a step on a device, initialized by running init.onnx."""
    moved = {name: set(part.writes) for name, part in step.manifest.parts.items()}
    movers = {s.name: [name for name, tensors in moved.items() if s.name in tensors] for s in step.manifest.state}
    state = State(step.manifest.state, placement, movers)
    model = step.init
    read = _read_straight(step, state)
    if computed := [name for name in state.specs if name not in read]:
        part = _cut_out(model, computed, ()) if read else model
        # no optimization: folding constants would compute the zeros of optimizer slots a second time
        session = create_session(part, placement, replace(options, optimization="none"), external_weights(step, part))
        binding = session.io_binding()
        for name, value in state.values(state.side).items():
            if name not in read:
                binding.bind_ortvalue_output(name, value)
        with explained("running init.onnx failed"):
            session.run_with_iobinding(binding)
    step.release_init()  # otherwise a second copy of the weights would stay in memory
    return state


def _read_straight(step: Step, state: State) -> set[str]:
    """Read the state tensors that init.onnx only copies from a weight file, unmapped; return their names."""
    if not state.on_cpu:
        return set()
    model = step.init
    stored = {t.name: t for t in model.graph.initializer if is_external(t) and not is_packed(t)}
    straight = {o.name: o.name for o in model.graph.output}
    straight |= {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "Identity" and not n.domain}
    read = {name for name in state.specs if straight.get(name) in stored}
    for name in read:
        state.read_in(name, step.pieces(stored[straight[name]]))
    return read


def followed(
    step: Step, placement: Placement, options: RuntimeOptions, weights: Mapping[str, Array]
) -> dict[str, Array]:
    """Return, by name, state tensors that init.onnx computes from new weights, such as an optimizer's copies."""
    model = widened(step.init)
    made = {name for node in model.graph.node for name in node.output}
    of_weights = set(weights) - made
    for node in model.graph.node:
        if not of_weights.isdisjoint(node.input):
            of_weights.update(node.output)
    names = [o.name for o in model.graph.output if o.name in of_weights & made]
    if not names:
        step.release_init()
        return {}
    part = _cut_out(model, names, weights)
    session = create_session(part, placement, options, external_weights(step, part))
    feeds = {i.name: to_ortvalue(np.ascontiguousarray(weights[i.name])) for i in part.graph.input}
    with explained("running init.onnx failed"):
        found = session.run_with_ort_values(names, feeds)
    step.release_init()
    specs = {s.name: s for s in step.manifest.state}
    return {n: fetched(v, numpy_dtype(specs[n].dtype)) for n, v in zip(names, found, strict=True)}


def _cut_out(model: onnx.ModelProto, outputs: list[str], fed: Collection[str]) -> onnx.ModelProto:
    """Return the part of init.onnx that computes ``outputs``, with the initializers in ``fed`` as inputs."""
    nodes, names = needed(model.graph.node, outputs, lambda node: node.output, lambda node: node.input)
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph = part.graph
    graph.name = model.graph.name
    graph.node.extend(nodes)
    graph.output.extend(o for o in model.graph.output if o.name in outputs)
    for tensor in model.graph.initializer:
        if tensor.name in fed and tensor.name in names:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        elif tensor.name in names:
            graph.initializer.append(tensor)
    return part

"""Sessions with the state bound to them, run with few copies, allocations and look-ups.

The code between two steps is optimised for speed. A step evicts Python's data from the CPU caches, so that a line of
Python takes several times as long as in a tight loop. Binding an array takes longer than copying about 100 kB.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort

from gradgraph.data.arrays.batch import Array, BatchChecker, Feed
from gradgraph.graph.shapes import sizes_or
from gradgraph.runtime.execution.after_loss import Keeping
from gradgraph.runtime.execution.ort_values import is_of_numpy, to_ortvalue
from gradgraph.runtime.execution.session import explanation, weights_pass_through
from gradgraph.runtime.execution.state import State, aligned_empty
from gradgraph.step.finishes import as_row, finished
from gradgraph.step.manifest import MeasureSpec, column

STAGED_BYTES = 100_000  # bytes: smaller arrays are copied into memory that stays bound, larger ones are bound


@dataclass(frozen=True)
class Ports:
    """The inputs and outputs of a session other than its batch.

    Attributes:
        results: reported name → floating-point output of one element, read back after every run.
        next_of: state tensor → output with its next value; empty except for training.
        constants: other inputs, such as hyperparameters → permanently bound memory that their owner writes into.
        measures: columns of the history that are computed from sums; these outputs are read back, too.
        memory: other outputs → the memory that they are written to.
    """

    results: Mapping[str, str] = field(default_factory=dict)
    next_of: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, ort.OrtValue] = field(default_factory=dict)
    measures: Sequence[MeasureSpec] = ()
    memory: Mapping[str, ort.OrtValue] = field(default_factory=dict)


class BoundSession:
    """A session whose state inputs, and for training its state outputs, are bound in advance.

    The state alternates between two sets of tensors; there is one binding for each.

    Args:
        session: the session of the model; inputs that are state tensors are read from ``state``.
        state: the state tensors, shared with the other sessions of a trainer.
        overwritable: state tensors that may share memory with their next values in this session.
        stand_ins: state tensor → another state tensor to read instead.
        keeps: None if in-place updates do not wait for the loss, so a failed run loses the state; False if they wait
            for the loss; True if they also require it to be finite.

    Attributes:
        numbers: results of the last run, overwritten by the next run.
        sums: sums of each measure in the last run, overwritten by the next run.
        rows: the values per sample of each per-sample measure in the last run, copied.
        gathers: shapes of the inputs whose rows the session gathers itself; empty if it does not.
        moved: bits of ``State.side`` for the groups of state tensors that a run updates.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        state: State,
        ports: Ports,
        overwritable: frozenset[str] = frozenset(),
        stand_ins: Mapping[str, str] | None = None,
        keeps: bool | None = None,
    ) -> None:
        self.session = session
        self.inputs = {i.name for i in session.get_inputs()}
        self._state = state
        self._next_of = ports.next_of
        self._stand_ins = stand_ins or {}
        self._further = ports.memory
        self._constants = {n: v for n, v in ports.constants.items() if n in self.inputs}
        types = {o.name: o for o in session.get_outputs()}
        self._buffers = {output: result_buffer(types[output]) for output in ports.results.values()}
        self.measures = [m for m in ports.measures if not m.rows]
        self._ranked = [m for m in ports.measures if m.rows]
        self.rows: dict[str, Array] = {}
        self.sums = {m.name: result_buffer(types[m.sums]) for m in self.measures}
        self._buffers |= {m.sums: self.sums[m.name] for m in self.measures}
        self._results = [(name, self._buffers[output].reshape(())) for name, output in ports.results.items()]
        self._read = [(name, value.item) for name, value in self._results]
        self.moved = state.bits(self._next_of)
        # tensors that both sets share, but this session must not overwrite: their next values are copied after the run
        copied = (state.shared & self._next_of.keys()) - overwritable
        self._copied = {name: state.tensor_like(name) for name in copied}
        self._sides: dict[int, Side] = {}
        self.numbers: dict[str, float] = {}
        self.gathers: Mapping[str, tuple[int, ...]] = {}
        gated = keeps is not None and bool(overwritable)
        self._keeping = None if keeps is None else Keeping(self._buffers[ports.results["loss"]], gated, keeps)
        self._is_undone = False  # whether the last run left the state unchanged because of its loss

    @property
    def shown(self) -> Mapping[str, float]:
        """The results of the last run by name, including columns of the history that are computed from its sums."""
        return Shown(self) if self.measures else self.numbers

    def release(self) -> None:
        """Drop references to batches, and any binding to a caller's array; the next run creates it anew."""
        self._sides = {number: side for number, side in self._sides.items() if side.let_go()}

    def run(self, feeds: Mapping[str, Feed], options: ort.RunOptions | None = None) -> None:
        """Run once; a training run makes its outputs the current state.

        Raises:
            ModelError: if onnxruntime fails. The current state is unchanged, or lost if tensors were overwritten.
            TerminatedError: if ``options.terminate`` was set during the run. The state is unchanged, or lost likewise.
        """
        if self._state.lost:
            self._state.check()
        binding = self.feed(feeds)
        for measure in self._ranked:  # bound again, as the last batch may have had a different number of rows
            binding.bind_output(measure.sums, "cpu")
        if self._keeping is not None:
            options = self._keeping.begin(options)
        try:
            self.session.run_with_iobinding(binding, options)
        except Exception as error:
            self._failed(error)
        self._is_undone = self._keeping is not None and self._keeping.refuses()
        if self._is_undone:
            self.numbers.update((name, read()) for name, read in self._read)
            return
        if self._next_of:
            for name, tensor in self._copied.items():
                self._state.put(name, tensor.read())
            self._state.swap(self.moved)
        numbers = self.numbers
        for name, read in self._read:
            numbers[name] = read()
        if self._ranked:
            found = binding.get_outputs()[-len(self._ranked) :]  # in binding order, in which these are last
            self.rows = {m.name: np.array(value.numpy()) for m, value in zip(self._ranked, found, strict=True)}

    def _failed(self, error: Exception) -> None:
        """Raise a readable form of ``error``, and mark the state as lost if it may be overwritten.

        Return normally if the run failed only because its loss is not finite.
        """
        if self._keeping is not None and self._keeping.is_refusal(error):
            return
        if self._next_of and not (self._keeping is not None and self._keeping.has_kept()):
            self._state.failed()
        raise explanation(error, "running the step failed") from error

    def undo(self) -> None:
        """Restore the state from before the last run, unless that run did not update it."""
        if not self._is_undone:
            self._state.undo(self.moved)

    def results(self) -> dict[str, Array]:
        """Return the results of the last run as arrays of rank 0; this takes twice as long as reading ``numbers``."""
        found = {name: value.copy() for name, value in self._results}
        if self.measures:
            found |= {name: np.asarray(value) for name, value in finished(self.measures, self.sums).items()}
        return found

    def feed(self, feeds: Mapping[str, Feed]) -> ort.IOBinding:
        """Copy or bind the batch ``feeds`` for the next run; return the binding to run with."""
        side = self.current_side()
        side.feed(feeds)
        return side.binding

    def current_side(self) -> Side:
        """Return the binding for the current set of state tensors."""
        number = self._state.side
        if number not in self._sides:
            self._sides[number] = Side(self.bound(number), self._state.on_cpu)
        return self._sides[number]

    def bound(self, side: int) -> ort.IOBinding:
        """Create the binding for a ``State.side``, which reads one set of state tensors and writes the other."""
        binding = self.session.io_binding()
        values = self._state.values(side)
        read = {name: values[self._stand_ins.get(name, name)] for name in values}
        for name, value in {**read, **self._constants}.items():
            if name in self.inputs:
                binding.bind_ortvalue_input(name, value)
        if self._next_of:
            following = self._state.values(side ^ self.moved)
            for name, output in self._next_of.items():
                copied = self._copied.get(name)
                binding.bind_ortvalue_output(output, following[name] if copied is None else copied.value)
        for name, array in self._buffers.items():
            binding.bind_ortvalue_output(name, to_ortvalue(array))
        for name, value in self._further.items():
            binding.bind_ortvalue_output(name, value)
        return binding


class Shown(Mapping[str, Any]):
    """A mapping from column name to result of a session's last run.

    Columns computed from sums are computed on access, since a progress bar does not show all of them.
    """

    def __init__(self, session: BoundSession) -> None:
        self._session = session

    def _now(self) -> dict[str, float]:
        return self._session.numbers | as_row(finished(self._session.measures, self._session.sums))

    def __getitem__(self, name: str) -> float:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


class Together:
    """The combined results of the sessions of several named steps; column names begin with the step's name."""

    def __init__(self, sessions: Mapping[str, BoundSession]) -> None:
        self._sessions = sessions

    @property
    def shown(self) -> Mapping[str, Any]:
        return {column(step, name): value for step, s in self._sessions.items() for name, value in s.shown.items()}

    def results(self) -> dict[str, Array]:
        return {column(step, name): value for step, s in self._sessions.items() for name, value in s.results().items()}


class Side:
    """A session's I/O binding for one of the two sets of state tensors, with the memory that holds the batch."""

    def __init__(self, binding: ort.IOBinding, on_cpu: bool) -> None:
        self.binding = binding
        self._on_cpu = on_cpu
        self._inputs: dict[str, _Input] = {}

    def feed(self, feeds: Mapping[str, Feed]) -> None:
        """Copy each array into the memory bound for its input, or bind the array's own memory.

        An array passed a second time stays bound, since its owner evidently refills it. On a device, binding copies, so
        everything is bound again in each run.
        """
        for name, feed in feeds.items():
            known = self._inputs.get(name)
            if known is None or not self._on_cpu or isinstance(feed, ort.OrtValue) or known.shape != feed.shape:
                self._bind(name, feed, known)
            elif known.bound is feed:
                continue
            elif known.stage is not None and known.seen is not feed:
                known.stage[...] = feed
                known.seen = feed
            elif known.stage is None and feed.nbytes > STAGED_BYTES:
                self.bind(name, feed)
            else:
                self._bind(name, feed, known)

    def let_go(self) -> bool:
        """Drop references to the caller's arrays; return whether none remains.

        A binding of an array's own memory keeps a reference; the caller must then drop this object.
        """
        for known in self._inputs.values():
            known.seen = None
        return all(known.bound is None for known in self._inputs.values())

    def bind(self, name: str, array: Array) -> None:
        """Bind the memory of ``array`` to the input ``name`` without copying, so later writes to it take effect."""
        self._inputs[name] = _Input(array.shape, array, None, array)
        bind_array(self.binding, name, array)

    def _bind(self, name: str, feed: Feed, known: _Input | None) -> None:
        if isinstance(feed, ort.OrtValue):
            self._inputs[name] = _Input((), feed, None, None)
            self.binding.bind_ortvalue_input(name, feed)
            return
        again = known is not None and known.seen is feed
        stage = None
        if self._on_cpu and feed.nbytes <= STAGED_BYTES and not again:
            stage = aligned_empty(feed.shape, feed.dtype)
            stage[...] = feed
        self._inputs[name] = _Input(feed.shape, feed if stage is None else None, stage, feed)
        bind_array(self.binding, name, feed if stage is None else stage)


class _Input:
    """The memory bound for an input.

    Attributes:
        shape: shape of the input; () for an OrtValue.
        bound: the caller's array or OrtValue whose memory is bound; None if arrays are copied into ``stage``.
        stage: the bound memory that arrays are copied into; None if a caller's array is bound.
        seen: the caller's last array.
    """

    __slots__ = ("bound", "seen", "shape", "stage")

    def __init__(self, shape: tuple[int, ...], bound: Feed | None, stage: Array | None, seen: Feed | None) -> None:
        self.shape, self.bound, self.stage, self.seen = shape, bound, stage, seen


def bind_array(binding: ort.IOBinding, name: str, array: Array) -> None:
    """Bind the memory of a C-contiguous array, which the binding keeps alive."""
    if is_of_numpy(array.dtype):
        binding.bind_cpu_input(name, array)
    else:
        binding.bind_ortvalue_input(name, to_ortvalue(array))


_FLOATS = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}


def result_buffer(output: Any) -> Array:
    """Return an array for the session output ``output``, with its declared shape; unknown sizes become 1."""
    return np.zeros(sizes_or(output.shape, 1), _FLOATS.get(output.type, np.float32))


@contextlib.contextmanager
def released(bound: BoundSession, checker: BatchChecker) -> Iterator[None]:
    """Run a block that runs ``bound`` on many batches, then make ``bound`` and ``checker`` drop references to them.

    Within the block, pages of mapped weights do not stay in memory.
    """
    try:
        with weights_pass_through(bound.session):
            yield
    finally:
        bound.release()
        checker.forget()

"""Memory estimates of a training step: persistent memory, and the peak of a simulated run (``walk.py``).

The interpreter with its libraries is not counted.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir

from gradgraph.data.record.specs import numpy_dtype
from gradgraph.errors import readable_bytes, shown
from gradgraph.files.external import Entry, external_entry, is_external
from gradgraph.graph.shapes import size_of_name
from gradgraph.runtime.execution.frozen_weights import copies_of, read_in_place
from gradgraph.runtime.execution.overwrites import may_overwrite, prepared, proven
from gradgraph.runtime.execution.part import Part
from gradgraph.runtime.execution.session import CPU, LEAST_PASSED, Placement, RuntimeOptions, copies_weights
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.runtime.execution.walk import Walk, walked
from gradgraph.runtime.saved.printed import html_table, text_table
from gradgraph.step.step import Step

MOST_MAPPED = 48 << 20  # bytes of pages that are mapped at a time while they are released (40 MB were measured)
OF_A_NODE = 32 << 10  # bytes per node for graph and kernel; measured: 17 to 35 KiB, in steps of 1,300 to 8,000 nodes


@dataclass(frozen=True)
class Memory:
    """A memory estimate in bytes, printed as a table.

    Attributes:
        sizes: the sizes of dynamic dimensions.
        weights: trained weights, with running statistics and counters.
        frozen: other stored tensors: frozen weights (quantised ones as integers) and constants. Weights of which the
            session keeps several copies, such as for the forward and the backward pass, count as often.
        optimizer: optimizer state.
        following: the second copy of state that a step cannot overwrite (see ``RuntimeOptions.in_place``).
        batch: inputs and targets.
        activations, gradients, update: tensors alive at the peak of a step, computed by the forward pass and the
            loss, by the backward pass, and by the optimizer.
        gaps: fragmentation of onnxruntime's allocator: free pieces that were too small, and its tables of pieces.
        session: onnxruntime's own memory: ``OF_A_NODE`` for each node of the lowered step.
    """

    sizes: Mapping[str, int]
    weights: int
    frozen: int
    optimizer: int
    following: int
    batch: int
    activations: int
    gradients: int
    update: int
    gaps: int
    session: int

    @property
    def peak(self) -> int:
        """The peak size of temporary tensors in bytes, without ``gaps``: activations, gradients and update."""
        return self.activations + self.gradients + self.update

    @property
    def total(self) -> int:
        """The total memory of training: the sum of all attributes."""
        kept = self.weights + self.frozen + self.optimizer + self.following + self.batch + self.session
        return kept + self.peak + self.gaps

    def as_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"peak": self.peak, "total": self.total}

    def _named_sizes(self) -> list[tuple[str, str]]:
        at = ", ".join(f"{shown(name)}={size}" for name, size in self.sizes.items())
        words = {"following": "their next values", "activations": "activations at the peak",
                 "gradients": "gradients at the peak", "update": "update at the peak",
                 "gaps": "gaps between them", "session": "the session"}  # fmt: skip
        rows = [(words.get(f.name, f.name), getattr(self, f.name)) for f in fields(self) if f.name != "sizes"]
        rows.append((f"a training step{f' ({at})' if at else ''}", self.total))
        return [(name, f"{readable_bytes(size):>10}") for name, size in rows if size]

    def __str__(self) -> str:
        return "\n".join(text_table(self._named_sizes()))

    def _repr_html_(self) -> str:
        return html_table(("", "memory"), ((name, size.strip()) for name, size in self._named_sizes()))


@dataclass(frozen=True)
class SessionMemory:
    """The predicted memory of one session, in bytes, besides state and mapped weights.

    Attributes:
        temporary: onnxruntime's allocator for intermediate tensors, twice the outputs, which are copied, and pages of
            weights that are released after they were read; at least a copy of the largest weight, which opening the
            session requires.
        graph: ``OF_A_NODE`` for each node.
        weights: frozen weights in the session's own memory, and those that only this session reads in place.
    """

    temporary: int
    graph: int
    weights: int

    @property
    def total(self) -> int:
        return self.temporary + self.graph + self.weights


class Prediction:
    """The predicted memory of a step.

    Args:
        given: sizes of dynamic dimensions; 1 by default.

    Attributes:
        sizes: the size of each dynamic dimension.
    """

    def __init__(self, session: StepSession, given: Mapping[str, int], graphs: AnySizeGraphs | None = None) -> None:
        self.session, self.given = session, given
        self._graphs = graphs or AnySizeGraphs(session)
        dimensions = session.manifest.open_dimensions
        self.sizes = {name: size_of_name(name, given, otherwise=1) for name in dimensions}

    @classmethod
    def here(cls, step: Step | str, options: RuntimeOptions | None, sizes: Mapping[str, int]) -> Prediction:
        """Return the prediction for a step or step folder on the CPU.

        Raises:
            UnknownNameError: if the step does not have one of the dimensions in ``sizes``.
        """
        step = step if isinstance(step, Step) else Step.load(step)
        step.manifest.check_sizes(sizes)
        return cls(StepSession(step, Placement((CPU,)), options or RuntimeOptions()), sizes)

    def at(self, sizes: Mapping[str, int]) -> Prediction:
        """Return the prediction for other sizes; both share what does not depend on sizes."""
        return Prediction(self.session, sizes, self._graphs)

    @functools.cached_property
    def _runs(self) -> dict[str, tuple[Walk, frozenset[str], Stored]]:
        """Each part's simulated run in its specialised session, the state that it overwrites, and its weights."""
        found = {}
        for name, part in self.session.parts.items():
            model, once = _lowered(self.session, part, self.sizes)
            packs = self.session.packs_for(part, self.sizes)
            found[name] = walked(model, self._state), once, Stored.of(self.session, model, packs)
        return found

    @functools.cached_property
    def _state(self) -> int:
        """The bytes of the state."""
        return sum(s.nbytes for s in self.session.manifest.state)

    @property
    def walks(self) -> dict[str, Walk]:
        """A simulated run of each train graph, by step name."""
        return {name: walk for name, (walk, *_) in self._runs.items()}

    @property
    def worst(self) -> str:
        """The name of the step with the highest peak."""
        return max(self.walks, key=lambda name: self.walks[name].taken)

    @functools.cached_property
    def memory(self) -> Memory:
        """The memory by kind."""
        m, most = self.session.manifest, self.walks[self.worst]
        once = frozenset[str]().union(*(names for _, names, _ in self._runs.values()))
        further = max(stored.beyond for *_, stored in self._runs.values())
        optimizer = sum(s.nbytes for s in m.state if s.kind == "optimizer")
        shapes = [[self.sizes[d] if isinstance(d, str) else d or 1 for d in spec.shape] for spec in m.batch]
        types = [numpy_dtype(spec.dtype) for spec in m.batch]
        return Memory(
            self.sizes,
            weights=self._state - optimizer,
            frozen=sum(bytes_of(tensor) for tensor in frozen_tensors(self.session.definition)) + further,
            optimizer=optimizer,
            following=sum(s.nbytes for s in m.state if s.name not in once),
            batch=sum(math.prod(shape) * int(of.itemsize) for shape, of in zip(shapes, types, strict=True)),
            **most.peak,
            gaps=most.taken - sum(most.peak.values()),
            session=OF_A_NODE * sum(len(walk.nodes) for walk in self.walks.values()),
        )

    @functools.cached_property
    def training(self) -> SessionMemory:
        """The training session for batches of any size, with the highest peak."""
        found = (self._session(graph) for graph in self._graphs.training)
        return max(found, key=lambda session: session.temporary)

    @functools.cached_property
    def evaluation(self) -> SessionMemory:
        """The session that computes loss and metrics of the evaluation graph."""
        return self._session(self._graphs.evaluation, trains=False)

    @functools.cached_property
    def prediction(self) -> SessionMemory:
        """The session that computes the outputs of the evaluation graph."""
        return self._session(self._graphs.prediction, trains=False)

    def _session(self, graph: AnySizeGraph, trains: bool = True) -> SessionMemory:
        """Return the memory of a session; with ``trains``, its outputs are written to the state, not copied."""
        walk, stored = walked(graph.model, self._state, self.sizes), graph.stored
        resident = set().union(*(first.mapped for *_, first in self._runs.values()))
        mapped = sum(size for place, size in stored.mapped.items() if place not in resident)
        passing = 0
        if not trains and self.session.opener.frozen_bytes >= LEAST_PASSED:
            passing, mapped = min(mapped, MOST_MAPPED), 0
        temporary = max(walk.taken + 2 * walk.returned * (not trains) + passing, stored.largest)
        return SessionMemory(temporary, OF_A_NODE * len(graph.model.graph.node), stored.own + mapped)


@dataclass(frozen=True)
class AnySizeGraph:
    """A graph as a session for batches of any size executes it, and the weights in the memory of the session."""

    model: onnx.ModelProto
    stored: Stored


class AnySizeGraphs:
    """The graphs of a step, lowered for batches of any size: forms for known sizes may need much less memory."""

    def __init__(self, session: StepSession) -> None:
        self._session = session

    @functools.cached_property
    def training(self) -> list[AnySizeGraph]:
        parts = self._session.parts.values()
        return [self._of(_lowered(self._session, part, {})[0], self._session.packs_for(part, {})) for part in parts]

    @functools.cached_property
    def evaluation(self) -> AnySizeGraph:
        return self._computing(*self._session.to_evaluate)

    @functools.cached_property
    def prediction(self) -> AnySizeGraph:
        return self._computing(*self._session.to_predict)

    def _computing(self, model: onnx.ModelProto, packs: bool) -> AnySizeGraph:
        return self._of(self._session.opener.lowered_to_compute(model), packs)

    def _of(self, model: onnx.ModelProto, packs: bool) -> AnySizeGraph:
        return AnySizeGraph(model, Stored.of(self._session, model, packs))


def _lowered(session: StepSession, part: Part, sizes: Mapping[str, int]) -> tuple[onnx.ModelProto, frozenset[str]]:
    """Return the train graph of ``part`` lowered for ``sizes``, and the names of the state tensors it overwrites."""
    options, next_of = session.options, part.ports.next_of
    model = session.opener.lowered(part.model, dict(sizes))
    if not may_overwrite(model, next_of, options):
        return model, frozenset()
    prepared(model, part.ports, options, checks_loss=True)
    return model, proven(model, next_of, options)


class Stored(NamedTuple):
    """The frozen weights that a session reads.

    Attributes:
        own: the bytes of all copies in the session's own memory.
        mapped: the sizes in bytes of the weights that it reads from their mapped files, by place.
        beyond: the bytes of its copies, and of mapped weights, except one of each weight.
        largest: the bytes of the largest weight that it copies, which is in memory twice meanwhile.
    """

    own: int
    mapped: Mapping[Entry, int]
    beyond: int
    largest: int

    @classmethod
    def of(cls, session: StepSession, model: onnx.ModelProto, packs: bool) -> Stored:
        """Return the weights of a session of a lowered graph that may (``packs``) copy external weights."""
        copied = copies_weights(model, session.placement, session.options, session.opener.frozen_bytes, packs)
        copies, lying = copies_of(model), read_in_place(model)
        kept, mapped, sizes = Counter[Entry](), dict[Entry, int](), dict[Entry, int]()
        for tensor in model.graph.initializer:
            outside = is_external(tensor)
            place = external_entry(tensor) if outside else Entry(tensor.name, 0, 0)
            sizes[place] = bytes_of(tensor)
            kept[place] += copies[tensor.name] * copied if outside else max(copies[tensor.name], 1)
            if outside and (tensor.name in lying or not copied):
                mapped[place] = sizes[place]
        return cls(
            sum(sizes[place] * count for place, count in kept.items()),
            mapped,
            sum(size * max(kept[place] + (place in mapped) - 1, 0) for place, size in sizes.items()),
            max((sizes[place] for place, count in kept.items() if count), default=0),
        )


def memory(step: Step | str, *, options: RuntimeOptions | None = None, **sizes: int) -> Memory:
    """Estimate the memory of training on this machine's CPU, without running anything.

    Args:
        step: a :class:`gradgraph.Step`, or a step folder.
        options: as for ``Trainer``.
        sizes: sizes of dynamic dimensions, such as ``batch=32``; 1 by default.

    Returns:
        The estimate in bytes, by kind, without the interpreter and its libraries (100 to 200 MB). If the step folder
        has several steps, the peak is the highest of all.

    Raises:
        UnknownNameError: if the step does not have one of the dimensions in ``sizes``.
    """
    return Prediction.here(step, options, sizes).memory


def frozen_tensors(step: Step) -> list[onnx.TensorProto]:
    """Return the initializers of a step's models that are not state tensors, each once."""
    state = {spec.name for spec in step.manifest.state}
    found = {t.name: t for model in (step.eval, *step.trains.values()) for t in model.graph.initializer}
    return [tensor for name, tensor in found.items() if name not in state]


def bytes_of(tensor: onnx.TensorProto) -> int:
    """Return the size of a tensor's elements in bytes, where two 4-bit elements share a byte."""
    bits: int = math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth
    return -(-bits // 8)

"""Memory estimates of a training step: persistent memory, and the peak of a simulated run (``walk.py``).

The interpreter with its libraries is not counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph.data.record.specs import numpy_dtype
from gradgraph.errors import readable_bytes, shown
from gradgraph.files.external import external_entry, is_external
from gradgraph.graph.shapes import size_of_name
from gradgraph.runtime.execution.frozen_weights import read_in_place, repacked
from gradgraph.runtime.execution.overwrites import may_overwrite, prepared, proven
from gradgraph.runtime.execution.part import Part
from gradgraph.runtime.execution.session import CPU, LEAST_PASSED, Placement, RuntimeOptions, copies_weights
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.runtime.execution.walk import Walk, walked
from gradgraph.runtime.saved.printed import html_table, text_table
from gradgraph.step.inference import without_loss
from gradgraph.step.step import Step

OF_A_NODE = 32 << 10  # bytes per node for graph and kernel; measured: 17 to 35 KiB, in steps of 1,300 to 8,000 nodes


@dataclass(frozen=True)
class Memory:
    """A memory estimate in bytes, printed as a table.

    Attributes:
        sizes: the sizes of dynamic dimensions.
        weights: trained weights, with running statistics and counters.
        frozen: other stored tensors: frozen weights (quantised ones as integers) and constants. Weights that the
            session repacks, and also reads as they are, count twice.
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
        temporary: onnxruntime's allocator for intermediate tensors, and twice the outputs, which are copied.
        graph: ``OF_A_NODE`` for each node.
        copies: weights that the session repacks.
    """

    temporary: int
    graph: int
    copies: int

    @property
    def total(self) -> int:
        return self.temporary + self.graph + self.copies


class Prediction:
    """The predicted memory of a step.

    Args:
        given: sizes of dynamic dimensions; 1 by default.

    Attributes:
        sizes: the size of each dynamic dimension.
    """

    def __init__(self, session: StepSession, given: Mapping[str, int]) -> None:
        self.session, self.given = session, given
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

    @functools.cached_property
    def _runs(self) -> dict[str, tuple[Walk, frozenset[str], tuple[int, int]]]:
        return {name: self._run(part) for name, part in self.session.parts.items()}

    def _run(self, part: Part) -> tuple[Walk, frozenset[str], tuple[int, int]]:
        """Return a simulated run of ``part``, the names of the state tensors that it overwrites, and ``_copies``."""
        options, next_of, once = self.session.options, part.ports.next_of, frozenset[str]()
        model = self.session.opener.lowered(part.model, self.sizes)
        if may_overwrite(model, next_of, options):
            prepared(model, part.ports, options, checks_loss=True)
            once = proven(model, next_of, options)
        return walked(model, sum(s.nbytes for s in self.session.manifest.state)), once, self._copies(model)

    def _copies(self, model: onnx.ModelProto, packs: bool = True) -> tuple[int, int]:
        """Return the bytes of the external weights that a session repacks, and of those that it also reads in place."""
        session, places = self.session, {t.name: t for t in model.graph.initializer if is_external(t)}
        if not copies_weights(model, session.placement, session.options, self._external, packs):
            return 0, 0
        copied = {external_entry(places[name]) for name in repacked(model) & places.keys()}
        lying = {external_entry(places[name]) for name in read_in_place(model) & places.keys()}
        return sum(entry.length for entry in copied), sum(entry.length for entry in copied & lying)

    @functools.cached_property
    def _external(self) -> int:
        """The bytes of all external weights; a part of a file that several initializers share counts once."""
        tensors = filter(is_external, frozen_tensors(self.session.definition))
        return sum(entry.length for entry in {external_entry(tensor) for tensor in tensors})

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
        twice = max(both for *_, (_, both) in self._runs.values())
        optimizer = sum(s.nbytes for s in m.state if s.kind == "optimizer")
        shapes = [[self.sizes[d] if isinstance(d, str) else d or 1 for d in spec.shape] for spec in m.batch]
        types = [numpy_dtype(spec.dtype) for spec in m.batch]
        return Memory(
            self.sizes,
            weights=sum(s.nbytes for s in m.state) - optimizer,
            frozen=sum(bytes_of(tensor) for tensor in frozen_tensors(self.session.definition)) + twice,
            optimizer=optimizer,
            following=sum(s.nbytes for s in m.state if s.name not in once),
            batch=sum(math.prod(shape) * int(of.itemsize) for shape, of in zip(shapes, types, strict=True)),
            **most.peak,
            gaps=most.taken - sum(most.peak.values()),
            session=OF_A_NODE * sum(len(walk.nodes) for walk in self.walks.values()),
        )

    @property
    def training(self) -> SessionMemory:
        """The training session with the highest peak."""
        walk, _, (copied, _) = self._runs[self.worst]
        return SessionMemory(walk.taken, OF_A_NODE * len(walk.nodes), copied)

    @functools.cached_property
    def evaluation(self) -> SessionMemory:
        """The session that computes loss and metrics of the evaluation graph."""
        return self._inference(self.session.definition.eval)

    @functools.cached_property
    def prediction(self) -> SessionMemory:
        """The session that computes the outputs of the evaluation graph."""
        return self._inference(without_loss(self.session.definition.eval, self.session.manifest))

    def _inference(self, model: onnx.ModelProto) -> SessionMemory:
        lowered = self.session.opener.lowered_at(model, self.sizes)
        walk, (copied, _) = walked(lowered), self._copies(lowered, packs=self._external < LEAST_PASSED)
        return SessionMemory(walk.taken + 2 * walk.returned, OF_A_NODE * len(walk.nodes), copied)


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

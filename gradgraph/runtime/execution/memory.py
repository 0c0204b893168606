"""Memory estimates of a training step: persistent memory, and the peak of a run.

The estimate walks through the nodes of the lowered train graph in execution order: a tensor lives from the node that
creates it to the last node that reads it. A simulation of onnxruntime's allocator (``arena.py``) adds its
fragmentation. Workspaces of kernels, and the interpreter with its libraries, are not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph.autodiff.path import reads
from gradgraph.backends.executed_order import as_executed
from gradgraph.data.record.specs import numpy_dtype
from gradgraph.errors import readable_bytes, shown
from gradgraph.graph.checks import subgraphs
from gradgraph.graph.shapes import all_sizes, is_elementwise, shape_of, size_of_name
from gradgraph.passes.normal.sizes.infer import infer_shapes
from gradgraph.runtime.execution.arena import Arena, Piece
from gradgraph.runtime.execution.liveness import VIEWS, most_alive
from gradgraph.runtime.execution.opened import OpenedStep
from gradgraph.runtime.execution.overwrites import may_overwrite, prepared, proven
from gradgraph.runtime.execution.part import Part
from gradgraph.runtime.execution.regions import USUAL, most_left, region_for
from gradgraph.runtime.execution.session import CPU, Placement, RuntimeOptions
from gradgraph.runtime.saved.printed import html_table, text_table
from gradgraph.step.manifest import Manifest
from gradgraph.step.step import Step

OF_A_NODE = 32 << 10  # bytes per node, for its graph and kernel; measured: 17 to 35 KiB, in steps of 1,300 to 8,000
KINDS: tuple[str, ...] = ("activations", "gradients", "update")


@dataclass(frozen=True)
class Memory:
    """A memory estimate in bytes, printed as a table.

    Attributes:
        sizes: the sizes of dynamic dimensions.
        weights: trained weights, with running statistics and counters.
        frozen: other stored tensors: frozen weights (quantised ones as integers) and constants.
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
    definition = step if isinstance(step, Step) else Step.load(step)
    return estimate(opened_here(definition, options), all_sizes_of(definition.manifest, sizes))


def moments(step: Step, sizes: Mapping[str, int], options: RuntimeOptions | None = None) -> dict[str, list[Moment]]:
    """Return the estimated memory in use after each node of each train graph, by step name."""
    opened, whole = opened_here(step, options), all_sizes_of(step.manifest, sizes)
    return {name: walked(as_run(opened, part, whole)[0]).moments for name, part in opened.parts.items()}


def as_run(opened: OpenedStep, part: Part, sizes: Mapping[str, int]) -> tuple[onnx.ModelProto, frozenset[str]]:
    """Return the train graph of ``part`` lowered for ``sizes``, and the names of the state tensors it overwrites."""
    model = opened.lowered(part.model, dict(sizes))
    if not may_overwrite(model, part.ports.next_of, opened.options):
        return model, frozenset()
    prepared(model, part.ports, opened.options, checks_loss=True)
    return model, proven(model, part.ports.next_of, opened.options)


def opened_here(step: Step, options: RuntimeOptions | None) -> OpenedStep:
    """Open the step on the CPU."""
    return OpenedStep(step, Placement((CPU,)), options or RuntimeOptions(), False)


def all_sizes_of(m: Manifest, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the size of each dynamic dimension, from ``sizes`` or 1; raise UnknownNameError for an unknown one."""
    m.check_sizes(sizes)
    return {name: size_of_name(name, sizes, otherwise=1) for name in m.open_dimensions}


def estimate(opened: OpenedStep, sizes: Mapping[str, int]) -> Memory:
    """Return the memory estimate for an opened step with these ``sizes`` of dynamic dimensions."""
    m = opened.manifest
    state = {kind: sum(s.nbytes for s in m.state if s.kind == kind) for kind in {s.kind for s in m.state}}
    optimizer = state.get("optimizer", 0)
    whole = sum(state.values())
    runs = [as_run(opened, part, sizes) for part in opened.parts.values()]
    once = frozenset[str]().union(*(names for _, names in runs))
    walks = [walked(model, whole) for model, _ in runs]
    most = max(walks, key=lambda walk: walk.taken)
    batch = 0
    for spec in m.batch:
        dims = (sizes.get(d, 1) if isinstance(d, str) else d or 1 for d in spec.shape)
        batch += math.prod(dims) * int(numpy_dtype(spec.dtype).itemsize)
    return Memory(
        dict(sizes),
        weights=whole - optimizer,
        frozen=sum(bytes_of(tensor) for tensor in frozen_tensors(opened.definition)),
        optimizer=optimizer,
        following=sum(s.nbytes for s in m.state if s.name not in once),
        batch=batch,
        **most.peak,
        gaps=most.taken - sum(most.peak.values()),
        session=OF_A_NODE * sum(len(model.graph.node) for model, _ in runs),
    )


def frozen_tensors(step: Step) -> list[onnx.TensorProto]:
    """Return the initializers of a step's models that are not state tensors, each once."""
    state = {spec.name for spec in step.manifest.state}
    found = {t.name: t for model in (step.eval, *step.trains.values()) for t in model.graph.initializer}
    return [tensor for name, tensor in found.items() if name not in state]


def bytes_of(tensor: onnx.TensorProto) -> int:
    """Return the size of a tensor's elements in bytes, where two 4-bit elements share a byte."""
    bits: int = math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth
    return -(-bits // 8)


# --- the peak ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """The memory in use after a node of a lowered graph has run.

    Attributes:
        made: bytes of the tensors that the node created.
        alive: bytes of all tensors alive after the node, by kind (``KINDS``).
    """

    node: str
    made: int
    alive: Mapping[str, int]


def walked(model: onnx.ModelProto, state: int = 0) -> Walk:
    """Return a simulated run of the lowered train graph ``model``.

    ``state`` is the size of the step's state in bytes, which affects the size of the arena's first region.
    """
    work: ir.Model = ir.from_proto(model)
    infer_shapes(work)
    return Walk(work.graph, region_for(state, most_alive(model)))


class Walk:
    """A simulated run of a graph that tracks the tensors alive after each node.

    ``region`` is the size of the arena's first region in bytes.

    Attributes:
        peak: bytes of intermediate tensors at the peak, by kind.
        worst: the tensors alive at the peak, with their bytes and kinds.
        last: for each tensor, the last node that reads it or a view of it.
        moments: the memory in use after each node.
        taken: total bytes of onnxruntime's allocator.
    """

    def __init__(self, graph: ir.Graph, region: int = USUAL) -> None:
        self._storage: dict[ir.Value, ir.Value] = {}  # view → the tensor whose memory it shares
        nodes = as_executed(graph)
        for node in nodes:
            if node.op_type in VIEWS and node.domain == "" and node.inputs[0] is not None:
                self._storage[node.outputs[0]] = self._root(node.inputs[0])
        self._left = Counter(x for node in nodes for x in {self._root(x) for x in reads(node)})
        self._bound = {self._root(y) for y in graph.outputs} | set(graph.outputs)  # written to the caller's memory
        self._alive: dict[ir.Value, tuple[int, str]] = {}
        self._totals = dict.fromkeys(KINDS, 0)
        self.peak = dict(self._totals)
        self.worst: dict[ir.Value, tuple[int, str]] = {}
        self.last = {self._root(x): node for node in nodes for x in reads(node)}
        self.moments: list[Moment] = []
        self._arena, self._pieces = Arena(region, most_left(region)), dict[ir.Value, Piece]()
        for node in nodes:
            self._run(node)
        self.taken = max(self._arena.taken, sum(self.peak.values()))

    def _root(self, value: ir.Value) -> ir.Value:
        return self._storage.get(value, value)

    def _run(self, node: ir.Node) -> None:
        read = dict.fromkeys(self._root(x) for x in reads(node))  # in a fixed order, so that estimates are repeatable
        made = sum(self._make(node, y, read) for y in node.outputs if y not in self._storage and y not in self._bound)
        self.moments.append(Moment(node.name or "", made, {**self._totals}))
        inside = max((sum(Walk(body).peak.values()) for body in subgraphs(node)), default=0)
        if sum(self._totals.values()) + inside > sum(self.peak.values()):
            self.peak, self.worst = {**self._totals}, {**self._alive}
            self.peak[_kind(node)] += inside
        for x in read:
            self._left[x] -= 1
        for x in read:  # onnxruntime keeps outputs without readers to the end
            if not self._left[x] and x in self._alive:
                size, kind = self._alive.pop(x)
                self._totals[kind] -= size
                self._arena.give(self._pieces.pop(x))

    def _make(self, node: ir.Node, y: ir.Value, read: Iterable[ir.Value]) -> int:
        size, kind, piece = _bytes_of(y, node), _kind(node), None
        if is_elementwise(node):  # the output reuses the memory of an input without other readers
            for x in read:
                if self._left[x] == 1 and self._alive.get(x, (0, ""))[0] == size and size:
                    before = self._alive.pop(x)
                    self._totals[before[1]] -= size
                    piece = self._pieces.pop(x)
                    break
        self._alive[y] = (size, kind)
        self._pieces[y] = piece or self._arena.take(size)
        self._totals[kind] += size
        return size


def _bytes_of(y: ir.Value, node: ir.Node) -> int:
    """Return the size in bytes of an output of ``node``, or of its largest input if the output's shape is unknown."""
    sizes = all_sizes(shape_of(y))
    if sizes is not None and y.dtype is not None:
        return math.ceil(math.prod(sizes) * y.dtype.itemsize)
    known = [(all_sizes(shape_of(x)), x) for x in node.inputs if x is not None and not x.is_initializer()]
    return max((math.ceil(math.prod(s) * x.dtype.itemsize) for s, x in known if s is not None and x.dtype), default=0)


def _kind(node: ir.Node) -> str:
    scope = (node.name or "").split("/", 1)[0]
    return {"grad": "gradients", "update": "update", "ascent": "update"}.get(scope, "activations")

"""A simulated run of a lowered graph: the tensors in memory at each node, and the bytes that onnxruntime allocates.

The simulation visits the nodes in execution order: a tensor lives from the node that creates it to the last node that
reads it or a view of it. ``arena.py`` adds the fragmentation of onnxruntime's allocator. Workspaces of kernels are not
counted.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import onnx
import onnx_ir as ir

from gradgraph.autodiff.path import reads
from gradgraph.backends.engine import bind
from gradgraph.backends.executed_order import as_executed
from gradgraph.graph.checks import subgraphs
from gradgraph.graph.lifetimes import bytes_alive, known_bytes, owners
from gradgraph.graph.shapes import is_elementwise
from gradgraph.passes.normal.sizes.infer import infer_shapes
from gradgraph.runtime.execution.arena import Arena, Piece
from gradgraph.runtime.execution.regions import USUAL, most_left, region_for

KINDS: tuple[str, ...] = ("activations", "gradients", "update")


@dataclass(eq=False)
class Tensor:
    """An intermediate tensor of a run.

    Attributes:
        bytes: its size.
        kind: one of ``KINDS``.
        first, last: the indices of the node that creates it, and of the last node that reads it; the number of nodes if
            none does, since onnxruntime keeps such a tensor to the end.
        end: the index of the last node at which it counts: before ``last`` if that node reuses its memory.
        reused: the tensor whose memory it reuses.
    """

    value: ir.Value
    bytes: int
    kind: str
    first: int
    last: int
    end: int
    reused: Tensor | None


class Walk:
    """A simulated run of a graph.

    Inputs, outputs and views of the graph's tensors are not counted. A tensor of unknown size is counted as large as
    its node's largest input.

    Args:
        region: bytes of the arena's first region.

    Attributes:
        nodes: the nodes in execution order.
        returned: bytes of the graph's outputs.
        tensors: the intermediate tensors, in the order in which they are created.
    """

    def __init__(self, graph: ir.Graph, region: int = USUAL) -> None:
        self.nodes, self._region = as_executed(graph), region
        shared = owners(self.nodes)
        bound = {shared.get(y, y) for y in graph.outputs}.union(graph.outputs)  # written to the caller's memory
        self.returned = sum(known_bytes(y) or 0 for y in graph.outputs)
        read = [dict.fromkeys(shared.get(x, x) for x in reads(node)) for node in self.nodes]
        last = {x: i for i, values in enumerate(read) for x in values}
        made = dict[ir.Value, Tensor]()
        for i, node in enumerate(self.nodes):
            unread = [made[x] for x in read[i] if x in made and last[x] == i] if is_elementwise(node) else []
            for y in node.outputs:
                if y not in shared and y not in bound:
                    size, end = _bytes_of(y, node, made), last.get(y, len(self.nodes))
                    reused = next((t for t in unread if t.bytes == size != 0), None)
                    if reused is not None:
                        reused.end -= 1
                    made[y] = Tensor(y, size, _kind(node), i, end, end, reused)
        self.tensors = list(made.values())

    @functools.cached_property
    def alive(self) -> dict[str, list[int]]:
        """The bytes of all tensors alive at each node, by kind."""
        lives = {kind: [(t.first, t.end, t.bytes) for t in self.tensors if t.kind == kind] for kind in KINDS}
        return {kind: bytes_alive(found, len(self.nodes) + 1)[:-1] for kind, found in lives.items()}

    @functools.cached_property
    def _worst(self) -> tuple[int, dict[str, int]]:
        """The index of the node with the most bytes alive, and these bytes by kind."""
        bodies = [max((sum(Walk(body).peak.values()) for body in subgraphs(node)), default=0) for node in self.nodes]
        totals = [sum(each) for each in zip(*self.alive.values(), bodies, strict=True)]
        at = max(range(len(totals)), key=totals.__getitem__, default=None)
        if at is None:
            return 0, dict.fromkeys(KINDS, 0)
        inside = {_kind(self.nodes[at]): bodies[at]}
        return at, {kind: found[at] + inside.get(kind, 0) for kind, found in self.alive.items()}

    @property
    def peak(self) -> dict[str, int]:
        """Bytes of intermediate tensors at the peak, by kind."""
        return self._worst[1]

    @property
    def at_peak(self) -> list[Tensor]:
        """The tensors alive at the peak."""
        at = self._worst[0]
        return [t for t in self.tensors if t.first <= at <= t.end]

    @property
    def made(self) -> list[int]:
        """The bytes of the tensors that each node creates."""
        return bytes_alive(((t.first, t.first, t.bytes) for t in self.tensors), len(self.nodes))

    @functools.cached_property
    def taken(self) -> int:
        """The total bytes of onnxruntime's allocator."""
        made, freed = defaultdict[int, list[Tensor]](list), defaultdict[int, list[Tensor]](list)
        for tensor in self.tensors:
            made[tensor.first].append(tensor)
            freed[tensor.last].append(tensor)
        arena, pieces = Arena(self._region, most_left(self._region)), dict[Tensor, Piece]()
        for i in range(len(self.nodes)):
            for tensor in made[i]:
                pieces[tensor] = arena.take(tensor.bytes) if tensor.reused is None else pieces.pop(tensor.reused)
            for tensor in freed[i]:
                if tensor.end == tensor.last:
                    arena.give(pieces.pop(tensor))
        return max(arena.taken, sum(self.peak.values()))


def walked(model: onnx.ModelProto, state: int = 0, sizes: Mapping[str, int] = MappingProxyType({})) -> Walk:
    """Return a simulated run of the lowered graph ``model``.

    Args:
        state: the size of the step's state in bytes, which affects the size of the arena's first region.
        sizes: the sizes of a batch, for a graph lowered for batches of any size.
    """
    work: ir.Model = ir.from_proto(model)
    region = region_for(state, _most_alive(work.graph))
    bind(work, sizes) if sizes else infer_shapes(work)
    return Walk(work.graph, region)


def most_alive(model: onnx.ModelProto) -> int:
    """Return the peak bytes of intermediate tensors of the lowered graph ``model``, a lower bound of the arena's size.

    No tensor reuses memory, and bodies of nodes do not count. It takes about 70 µs per node.
    """
    return _most_alive(ir.from_proto(model).graph)


def _most_alive(graph: ir.Graph) -> int:
    walk = Walk(graph)
    return max(bytes_alive(((t.first, t.last, t.bytes) for t in walk.tensors), len(walk.nodes) + 1))


def _bytes_of(y: ir.Value, node: ir.Node, made: Mapping[ir.Value, Tensor]) -> int:
    """Return the size in bytes of an output of ``node``, or of its largest input if the output's size is unknown."""
    if (size := known_bytes(y)) is not None:
        return size
    sizes = (made[x].bytes if x in made else known_bytes(x) or 0 for x in reads(node) if not x.is_initializer())
    return max(sizes, default=0)


def _kind(node: ir.Node) -> str:
    scope = (node.name or "").split("/", 1)[0]
    return {"grad": "gradients", "update": "update", "ascent": "update"}.get(scope, "activations")

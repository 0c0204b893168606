"""The choice of the cut between values that are kept and nodes that run in each epoch.

It is a minimum cut, which minimises the bytes kept for each sample. Nodes after the cut run in each epoch, which costs
a part of the bytes that they read and write, so that a cheap node whose result is larger than its input (a Cast, a
Resize) stays after the cut. Matrix products, loops and unknown operators never run in each epoch if their result can be
kept.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator

import onnx_ir as ir

from gradgraph.autodiff.path import reads
from gradgraph.graph.shapes import is_elementwise
from gradgraph.runtime.features.static_values import StaticValues

_NEVER = 1 << 60  # the capacity of an edge that must not be cut
_LONG = 1 << 40  # the cost of computing a matrix product in each epoch: more than the bytes of any sample
_RUN = 4  # bytes that a node reads and writes in each epoch, per byte kept, at equal cost
_VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
# operators that take about as long as reading and writing their tensors
_NAMES = (
    "ArgMax ArgMin AveragePool BatchNormalization Concat ConstantOfShape CumSum DepthToSpace DequantizeLinear Dropout "
    "Expand Gather GatherElements GatherND GlobalAveragePool GlobalMaxPool GroupNormalization Hardmax "
    "InstanceNormalization LayerNormalization LogSoftmax LpNormalization MaxPool OneHot Pad QuantizeLinear "
    "RMSNormalization ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
    "ReduceSum ReduceSumSquare Resize Shape Size Slice Softmax SpaceToDepth Split Tile Transpose Trilu"
)
_MOVES = frozenset(_NAMES.split())


def takes_long(node: ir.Node) -> bool:
    """Whether ``node`` computes more than it reads and writes, as matrix products do."""
    return bool(node.domain) or not (is_elementwise(node) or node.op_type in _VIEWS | _MOVES)


def cheapest_cut(static: StaticValues) -> list[ir.Value]:
    """Return the values to keep, in the order in which they are computed; inputs of the batch may be among them."""
    network = _Network()
    end = "end"
    for x in static.rows:
        if x.producer() is None:
            network.join("begin", ("value", x), static.rows[x].nbytes)
    for node in static.nodes:
        network.join("begin", node, _cost(node, static))
        if node in static.mixing:
            network.join(node, end, _NEVER)
        for y in node.outputs:
            network.join(node, ("value", y), static.rows[y].nbytes if y in static.rows else _NEVER)
        for x in reads(node):
            network.join(("value", x), node, _NEVER)
    for x in static.read:
        network.join(("value", x), end, _NEVER)
    after = network.cut("begin", end)
    return [x for x in static.rows if ("value", x) in after and (x.producer() or "begin") not in after]


def _cost(node: ir.Node, static: StaticValues) -> int:
    """Return the cost of running ``node`` in each epoch."""
    if takes_long(node):
        return _LONG
    if node.op_type in _VIEWS:
        return 0
    touched = (*(x for x in node.inputs if x is not None), *node.outputs)
    return sum(static.sizes.get(x.name or "", 0) for x in touched) // _RUN


class _Network:
    """A flow network with integer capacities; minimum cuts are found by Dinic's algorithm."""

    def __init__(self) -> None:
        self._left: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)

    def join(self, a: Hashable, b: Hashable, capacity: int) -> None:
        """Add an edge from ``a`` to ``b``."""
        self._left[a][b] = min(self._left[a].get(b, 0) + capacity, _NEVER)
        self._left[b].setdefault(a, 0)

    def cut(self, begin: Hashable, end: Hashable) -> set[Hashable]:
        """Return the vertices after the minimum cut that is nearest to ``end``."""
        while levels := self._levels(begin, end):
            edges = {vertex: iter(list(self._left[vertex])) for vertex in levels}
            while self._push(begin, end, levels, edges):
                pass
        after, waiting = {end}, [end]
        while waiting:
            vertex = waiting.pop()
            for other in self._left[vertex]:
                if other not in after and self._left[other][vertex]:
                    after.add(other)
                    waiting.append(other)
        return after

    def _levels(self, begin: Hashable, end: Hashable) -> dict[Hashable, int]:
        """Return the distance of each vertex from ``begin``; empty if ``end`` is not reached."""
        levels, waiting = {begin: 0}, deque([begin])
        while waiting:
            vertex = waiting.popleft()
            for other, left in self._left[vertex].items():
                if left and other not in levels:
                    levels[other] = levels[vertex] + 1
                    waiting.append(other)
        return levels if end in levels else {}

    def _push(
        self, begin: Hashable, end: Hashable, levels: dict[Hashable, int], edges: dict[Hashable, Iterator[Hashable]]
    ) -> bool:
        """Send flow along one path of increasing levels; return whether there is one."""
        path = [begin]
        while path[-1] != end:
            vertex = path[-1]
            step = next(
                (o for o in edges[vertex] if self._left[vertex][o] and levels.get(o) == levels[vertex] + 1), None
            )
            if step is None:
                path.pop()
                if not path:
                    return False
                continue
            path.append(step)
        flow = min(self._left[a][b] for a, b in itertools.pairwise(path))
        for a, b in itertools.pairwise(path):
            self._left[a][b] -= flow
            self._left[b][a] += flow
        return True

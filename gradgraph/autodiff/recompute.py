"""Recomputation (gradient checkpointing): the backward pass recomputes forward values instead of storing them.

The forward pass is cut into segments. Values that cross a cut are stored. Other values are freed as the forward pass
proceeds, and are recomputed when the segment's gradient arrives (except in the last segment, whose gradient follows
immediately). So only one segment's tensors are alive at a time.

1. The recomputing copies of a segment's nodes read stored values through ``After``, so they run after all gradients of
   the next segment. No runtime can run them early, or merge them with the original nodes.
2. Values that depend on weights only are not recomputed. Random numbers from a runtime's generator, outputs of custom
   operators and values that may be sequences are stored.
3. BatchNormalization in training mode overwrites its inputs 3 and 4, so a copy reads its own copies of them. The new
   running statistics are those of the original node.
4. Dropout masks are functions of the step's counter, so a recomputed mask is equal to the original one.
5. The mean and deviation that a norm outputs are small, so they are stored. Therefore the last norm of a segment, whose
   result only the next segment reads, is not recomputed: no copy would read that result, and onnxruntime would keep it
   until the end of the step.
6. Runtimes fuse two nodes if no other node reads the value between them, and fused kernels round differently. So if
   recomputation leaves a value with a single reader in the forward pass, the reader reads it through ``After``.
"""

from __future__ import annotations

import bisect
import functools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from gradgraph.autodiff.after import after, turn_after
from gradgraph.autodiff.path import Path, carries, is_tensor, reads
from gradgraph.autodiff.reverse import backward
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import DRAWING, subgraphs
from gradgraph.graph.prune import needed
from gradgraph.graph.shapes import is_elementwise
from gradgraph.passes.normal.functions.inline import copied

AGAIN = "again"  # scope of recomputed nodes
_DOMAINS = ("", "gradgraph")
_WITH_STATISTICS = frozenset({"BatchNormalization", "LayerNormalization"})  # outputs after the first are statistics
# Updates of a weight. The last output is the next weight, or else the next moment: an update that the next segment
# waits for would not overwrite its weight, since other weights are read later (see ``runtime/execution/inplace.py``).
_UPDATES = frozenset({"Add", "Sub", "AdamUpdate", "MomentumUpdate"})
# operators, besides elementwise ones, that runtimes fuse with a node before them
_FUSED = frozenset({"BatchNormalization", "Gelu", "LayerNormalization", "ReduceMean", "ReduceSum", "RMSNormalization",
                    "Softmax", "Sum"})  # fmt: skip


@dataclass(frozen=True)
class Written:
    """A backward pass that was added to a graph.

    Attributes:
        forward: the nodes of the graph before the backward pass was added, in order.
        backward: the nodes of the backward pass, in order.
        begins: for each differentiated forward node, the index in ``backward`` where its gradient begins.
        gradients: the gradient of each differentiation variable that has one.
    """

    forward: Sequence[ir.Node]
    backward: Sequence[ir.Node]
    begins: Mapping[ir.Node, int]
    gradients: Mapping[ir.Value, Var]


def written_backward(
    op: Builder, path: Path, seeds: Mapping[ir.Value, Var | Sequence[Var]], graph: ir.Graph
) -> Written:
    """Run ``reverse.backward`` for a path in ``graph``, recording the nodes that it writes."""
    first, begins = len(op.nodes), dict[ir.Node, int]()
    gradients = backward(op, path, seeds, begins)
    return Written(list(graph), op.nodes[first:], {n: begin - first for n, begin in begins.items()}, gradients)


class Differentiated:
    """A forward pass and its backward pass, both in one graph.

    Attributes:
        forward: the nodes of the forward pass, in order.
        backward: the nodes of the backward pass, in order.
        place: the index of each node in ``forward``.
        reads: the values that each node in ``forward`` reads.
        moving: forward values that depend on more than weights and constants.
        results: the gradients.
        needed: the indices of the nodes in ``backward`` that the results need.
        dead: the nodes in ``backward`` that no result needs.
        read: for each forward value that needed backward nodes read, the indices of these nodes.
    """

    def __init__(self, written: Written) -> None:
        self.forward, self.backward = written.forward, written.backward
        self.results = {g.value for g in written.gradients.values()}
        self.place = {node: i for i, node in enumerate(self.forward)}
        self.reads = [list(dict.fromkeys(reads(node))) for node in self.forward]
        starts = sorted((begin, -self.place[node]) for node, begin in written.begins.items() if node in self.place)
        self._begins, self._owners = [begin for begin, _ in starts], [-place for _, place in starts]
        alive = set(needed(self.backward, self.results, lambda n: n.outputs, reads)[0])
        self.needed = [i for i, node in enumerate(self.backward) if node in alive]
        self.dead = {node for node in self.backward if node not in alive}
        self.read: dict[ir.Value, list[int]] = defaultdict(list)
        self.moving: set[ir.Value] = set()
        for node, read in zip(self.forward, self.reads, strict=True):
            if not is_pure(node) or any(x in self.moving or _is_fed(x) for x in read):
                self.moving.update(node.outputs)
        for i in self.needed:
            for x in dict.fromkeys(reads(self.backward[i])):
                if x.producer() in self.place:
                    self.read[x].append(i)

    def owner(self, index: int) -> int:
        """Return the index of the forward node whose gradient includes the backward node at ``index``."""
        at = bisect.bisect_right(self._begins, index)
        return self._owners[at - 1] if at else len(self.forward)

    def begin(self, cut: int) -> int:
        """Return the index in ``backward`` where the gradients of the forward nodes before ``cut`` begin."""
        at = bisect.bisect_left(self._owners, -cut + 1, key=lambda place: -place)
        return self._begins[at] if at < len(self._begins) else len(self.backward)


def _is_fed(x: ir.Value) -> bool:
    return x.producer() is None and not x.is_initializer()


def is_pure(node: ir.Node) -> bool:
    """Whether ``node`` is known to be deterministic."""
    nodes = [node, *(n for graph in subgraphs(node) for n in graph.all_nodes())]
    drops = any(n.op_type == "Dropout" and len(n.inputs) > 2 for n in nodes)
    return not drops and not any(n.domain not in _DOMAINS or n.op_type in DRAWING for n in nodes)


@dataclass(frozen=True)
class Segments:
    """A forward pass cut into segments.

    Args:
        passes: the forward and backward pass.
        cuts: ascending indices in the forward pass, at each of which a segment begins, in addition to 0.
        only: the nodes that may be recomputed; None for all.

    Attributes:
        kept: the values that are stored instead of recomputed.
    """

    passes: Differentiated
    cuts: Sequence[int]
    only: Collection[ir.Node] | None = None

    def of(self, place: int) -> int:
        return bisect.bisect_right(self.cuts, place)

    @functools.cached_property
    def kept(self) -> set[ir.Value]:
        p = self.passes
        found: set[ir.Value] = set()
        for i, read in enumerate(p.reads):
            for x in read:
                node = x.producer()
                if node in p.place and self.of(p.place[node]) < self.of(i):
                    found.add(x)
        for node in p.forward:
            is_out = self.only is not None and node not in self.only
            if is_out or not is_pure(node) or not all(map(is_tensor, node.outputs)):
                found.update(node.outputs)
            if node.op_type in _WITH_STATISTICS:
                found.update(y for y in node.outputs[1:] if y in p.read)
        for x, readers in p.read.items():
            node = x.producer()
            assert node is not None
            if any(self.of(p.owner(i)) > self.of(p.place[node]) for i in readers):
                found.add(x)
        return found

    def again(self, segment: int) -> list[ir.Node]:
        """Return the nodes of a segment that are recomputed, in graph order."""
        p, first = self.passes, self.cuts[segment - 1] if segment else 0
        last = self.cuts[segment]
        wanted = {x for i in range(first, last) for x in p.forward[i].outputs if x in p.read and self._is_copied(x)}
        found = []
        for i in range(last - 1, first - 1, -1):
            node = p.forward[i]
            if not wanted.isdisjoint(node.outputs):
                found.append(node)
                scratch = _scratch(node)
                for x in p.reads[i]:
                    maker = x.producer()
                    inside = maker in p.place and first <= p.place[maker]
                    if inside and (x in scratch or self._is_copied(x)):
                        wanted.add(x)
        return found[::-1]

    def _is_copied(self, x: ir.Value) -> bool:
        return x in self.passes.moving and x not in self.kept


def _scratch(node: ir.Node) -> Collection[ir.Value]:
    """Return the inputs of ``node`` that onnxruntime overwrites."""
    if node.op_type != "BatchNormalization" or node.domain or not node.attributes["training_mode"].as_int():
        return ()
    return {x for x in node.inputs[3:5] if x is not None}


def recompute_values(op: Builder, segments: Segments) -> None:
    """Insert copies of each segment's nodes before its gradients, which read the copies.

    ``op`` names new nodes; it must not have pending nodes.
    """
    p = segments.passes
    graph = p.forward[0].graph if p.forward else None
    if not isinstance(graph, ir.Graph) or not segments.cuts:
        return
    lost: list[ir.Value] = []
    done, turn = 0, None
    for segment in range(len(segments.cuts) - 1, -1, -1):
        begin = p.begin(segments.cuts[segment])
        turn = _turn(op, p, done, begin) or turn
        done, nodes = begin, segments.again(segment)
        if turn is None or not nodes or begin == len(p.backward):
            op.nodes = []
            continue
        first = segments.cuts[segment - 1] if segment else 0
        end = p.begin(first) if first else len(p.backward)
        late = _Late(op, turn)
        lost += _copy(op, p, nodes, segments.kept, late)
        if segments.only is None:
            _read_late(p, range(begin, end), late)
        op.finish(graph, p.backward[begin])
    _separate_readers(op, p, graph, lost)
    _wait_for_updates(graph, p.results)


def _separate_readers(op: Builder, p: Differentiated, graph: ir.Graph, values: Iterable[ir.Value]) -> None:
    """Insert an ``After`` before the only reader of each of ``values`` in the forward pass, to prevent fusion.

    Values with several readers are left unchanged.
    """
    empty = (None, ir.DataType.STRING)  # types that `turn_after` cannot read
    fed = next((x for read in p.reads for x in read if _is_fed(x) and is_tensor(x) and x.dtype not in empty), None)
    ways = [(x, next(iter(x.uses()))) for x in values if x in p.read and len(x.uses()) == 1 and is_tensor(x)]
    ways = [(x, use) for x, use in ways if use.node in p.place and _may_fuse(use.node)]
    if fed is None or not ways:
        return
    op.scope = "apart"
    turn = turn_after(op, [op.wrap(fed)])
    op.finish(graph, p.forward[0])
    for x, use in ways:
        with op.naming_operators():
            late = after(op, op.wrap(x), turn)
        op.finish(graph, use.node)
        use.node.replace_input_with(use.idx, late.value)


def _may_fuse(node: ir.Node) -> bool:
    """Whether runtimes may fuse ``node`` with its producer; False for products, which runtimes fuse in any case."""
    return not node.domain and (is_elementwise(node) or node.op_type in _FUSED)


def _turn(op: Builder, p: Differentiated, begin: int, end: int) -> Var | None:
    """Return a ``turn`` that is computed after the results of the backward nodes from ``begin`` to ``end``.

    Returns None if no other node reads a result of these nodes.
    """
    alive = p.needed[bisect.bisect_left(p.needed, begin) : bisect.bisect_left(p.needed, end)]
    inside = p.dead.union(p.backward[i] for i in alive)
    given = [
        y for i in alive for y in p.backward[i].outputs
        if carries(y) and is_tensor(y) and (y in p.results or any(use.node not in inside for use in y.uses()))
    ]  # fmt: skip
    op.scope = f"{AGAIN}/turn"
    return turn_after(op, [op.wrap(y) for y in given]) if given else None


def _wait_for_updates(graph: ir.Graph, results: Collection[ir.Value]) -> None:
    """Make recomputed nodes that wait for a weight's gradient wait for its update instead, in place.

    The gradient then has a single reader: it is freed after the update instead of at the end of its segment, and
    runtimes fuse the product that computes it with an update of one node: ``w + xᵀ·dy``.
    """
    late = set(results)
    for node in graph:
        if any(x in late for x in reads(node)):
            late.update(node.outputs)
    moved = False
    for g in results:
        waiting = [use for use in g.uses() if (use.node.name or "").startswith(f"{AGAIN}/")]
        others = [use.node for use in g.uses() if use not in waiting]
        update = others[0] if waiting and len(others) == 1 and others[0].graph is graph else None
        if update is None or update.op_type not in _UPDATES or any(x in late for x in update.inputs if x is not g):
            continue
        for use in waiting:
            use.node.replace_input_with(use.idx, update.outputs[-1])
        moved = True
    if moved:
        graph.sort()


class _Late(dict[ir.Value, ir.Value]):
    """A cache of ``After`` nodes: maps each value to ``after(value, turn)``."""

    def __init__(self, op: Builder, turn: Var) -> None:
        self._op, self._turn = op, turn

    def __missing__(self, x: ir.Value) -> ir.Value:
        self._op.scope = AGAIN
        with self._op.naming_operators():
            self[x] = after(self._op, self._op.wrap(x), self._turn).value
        return self[x]


def _read_late(p: Differentiated, part: range, late: _Late) -> None:
    """Make the backward nodes at indices ``part`` read stored values through ``After``, so that none runs early."""
    for i in p.needed[bisect.bisect_left(p.needed, part.start) : bisect.bisect_left(p.needed, part.stop)]:
        node = p.backward[i]
        for at, x in enumerate(node.inputs):
            if x is not None and x in p.moving and x.producer() in p.place and is_tensor(x):
                node.replace_input_with(at, late[x])


def _copy(
    op: Builder, p: Differentiated, nodes: Sequence[ir.Node], kept: Collection[ir.Value], late: _Late
) -> list[ir.Value]:
    """Copy ``nodes`` for the backward pass and make it read the copies; return the values that it no longer reads."""
    made = {y for node in nodes for y in node.outputs}
    scratch = {x for node in nodes for x in _scratch(node)}
    read: dict[ir.Value, ir.Value] = {}
    for node in nodes:
        owns = not scratch.isdisjoint(node.outputs)
        for x in p.reads[p.place[node]]:
            if x not in made and (owns or x in p.moving or _is_fed(x)) and is_tensor(x):
                read[x] = late[x]
    copies, values = copied(nodes, functools.partial(op.fresh_in, AGAIN), read)
    op.nodes += copies
    readers = {*p.backward, *(n for node in p.backward for graph in subgraphs(node) for n in graph.all_nodes())}
    gone = {old: new for old, new in values.items() if old not in kept}  # stored values are still read themselves
    for old, new in gone.items():
        for use in [use for use in old.uses() if use.node in readers]:
            use.node.replace_input_with(use.idx, new)
    return list(gone)

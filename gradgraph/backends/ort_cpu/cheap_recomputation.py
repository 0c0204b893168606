"""Recompute cheap functions of saved tensors in the backward pass instead of storing them.

An example is SiLU after a GroupNormalization. The backward pass reads three tensors of the same size: the input of the
norm, the sigmoid, and the product. The last two can be computed from the first in one pass. Therefore only the first is
saved, and copies of the nodes recompute the others just before the first backward node that reads them.

No other large tensor is saved instead: a value is recomputed only if it depends on inputs, weights and tensors that the
backward pass needs anyway. The copies run late because they read one of these values through ``After``, which waits for
the preceding gradient (see ``autodiff/recompute.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import onnx_ir as ir

from gradgraph.autodiff.after import after, turn_after
from gradgraph.autodiff.path import reads
from gradgraph.autodiff.recompute import AGAIN
from gradgraph.backends.executed_order import as_executed
from gradgraph.backends.ort_operators import BLOCKED
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.lifetimes import VIEWS, is_view, known_bytes, owners
from gradgraph.graph.shapes import is_elementwise
from gradgraph.passes.normal.edit import names_of
from gradgraph.passes.normal.functions.inline import copied

LEAST = 1 << 20  # bytes: smaller tensors are not recomputed
LEAST_OF_ALL = 64 << 20  # total bytes of recomputed tensors below which recomputation does not pay
MOST_NODES = 8  # maximum nodes recomputed per tensor: without a limit, residual sums would lead back to the first block
_GRADIENT = "grad"
_LATE = frozenset({_GRADIENT, "update", "ascent", AGAIN})  # scopes of nodes after the forward pass
_CHEAP = frozenset(
    {("", name) for name in (*VIEWS, "InstanceNormalization", "LayerNormalization", "RMSNormalization", "Transpose")}
    | {(BLOCKED, name) for name in ("ReorderInput", "ReorderOutput")}
)


def recompute_cheap_values(model: ir.Model) -> bool:
    """Copy cheap nodes of the main graph for its backward pass, in place; return whether any were copied."""
    if sum(_bytes_at_most(node) for node in model.graph) < LEAST_OF_ALL:
        return False
    kept = Kept(model.graph)
    if sum(known_bytes(y) or 0 for y in {kept.root(y) for y in kept.again}) < LEAST_OF_ALL:
        return False
    written = _write_copies(model, kept)
    model.graph.sort()
    return written


def _bytes_at_most(node: ir.Node) -> int:
    """Return an upper bound of the bytes of the outputs of ``node`` that are recomputed, without looking around it."""
    if is_late(node):
        return 0
    sizes = {y: known_bytes(y) or 0 for y in node.outputs}
    if not _is_cheap(node):
        return 0
    return sum(size for y, size in sizes.items() if size >= LEAST and any(map(is_late, _readers(y))))


def _is_cheap(node: ir.Node) -> bool:
    return is_elementwise(node) or (node.domain, node.op_type) in _CHEAP


class Kept:
    """The forward values that the backward pass reads, divided into saved and recomputed ones.

    Attributes:
        order: the nodes in execution order.
        again: values to recompute, each with the nodes that compute it, in order.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.order = as_executed(graph)
        self.again: dict[ir.Value, tuple[ir.Node, ...]] = {}
        self._graph = graph
        self._storage = owners(self.order)
        self._read_late = {self.root(x) for node in self.order if is_late(node) for x in reads(node)}
        self._ways: dict[ir.Value, tuple[ir.Node, ...]] = {}  # nodes that recompute a value; none if it is saved
        for node in self.order:
            if not is_late(node):
                self._look_at(node)

    def root(self, x: ir.Value) -> ir.Value:
        """Return the value whose memory ``x`` shares."""
        return self._storage.get(x, x)

    def _look_at(self, node: ir.Node) -> None:
        nodes = self._nodes_for(node)
        for y in node.outputs:
            size = known_bytes(y)
            if size is not None and size < LEAST:
                self._ways[y] = ()
            elif nodes and self._may_go(y):
                self._ways[y] = nodes
                if any(map(is_late, _readers(y))):
                    self.again[y] = nodes
            elif self.root(y) in self._read_late:
                self._ways[y] = ()

    def _nodes_for(self, node: ir.Node) -> tuple[ir.Node, ...] | None:
        """Return the nodes that recompute the outputs of ``node``; None if recomputation is not cheap."""
        ways = [() if x.producer() is None else self._ways.get(x) for x in reads(node)]
        if not _is_cheap(node) or None in ways or all(x.const_value is not None for x in reads(node)):
            return None
        if is_view(node) and not ways[0]:  # a view of a saved value needs no memory
            return None
        nodes = dict.fromkeys(n for way in ways for n in way or ())
        count = sum(not is_view(n) for n in (*nodes, node))
        return (*nodes, node) if count <= MOST_NODES else None

    def _may_go(self, y: ir.Value) -> bool:
        """Return whether ``y`` may be recomputed: its sizes are known, and only nodes of the main graph read it."""
        return (
            known_bytes(y) is not None and not y.is_graph_output() and all(n.graph is self._graph for n in _readers(y))
        )


def is_late(node: ir.Node) -> bool:
    """Return whether ``node`` was written after the forward pass, by the scope in its name."""
    return (node.name or "").partition("/")[0] in _LATE


def _readers(y: ir.Value) -> Iterable[ir.Node]:
    return dict.fromkeys(node for node, _ in y.uses())


# --- rewriting ---------------------------------------------------------------------------------------------------


def _write_copies(model: ir.Model, kept: Kept) -> bool:
    """Write nodes that recompute ``kept.again`` for the backward pass; return whether there were any."""
    op = Builder(names_of(model))
    place = {node: i for i, node in enumerate(kept.order)}
    readers = {y: min((n for n in _readers(y) if is_late(n)), key=place.__getitem__) for y in kept.again}
    turns = _turns(kept)
    # a first reader that no gradient precedes keeps reading the saved tensor, as nothing could delay a copy
    first = {y: node for y, node in readers.items() if turns[place[node]] is not None}
    copies: dict[ir.Value, ir.Value] = {}
    for y in sorted(first, key=lambda y: place[first[y]]):
        before = turns[place[first[y]]]
        nodes = [n for n in kept.again[y] if n.outputs[0] not in copies]
        if before is None or not nodes:
            continue
        late = dict[ir.Value, ir.Value]()
        if sources := list(_sources(nodes, copies)):  # a turn that nothing waits for would run before all updates
            op.scope = f"{AGAIN}/turn"
            turn = turn_after(op, [op.wrap(before)])
            late = {x: _late(op, x, turn) for x in sources}
        written, values = copied(nodes, functools.partial(op.fresh_in, AGAIN), copies | late)
        op.nodes += written
        copies |= values
        op.finish(model.graph, first[y])
    for y in first:
        for node, i in [use for use in y.uses() if y in copies and is_late(use.node)]:
            node.replace_input_with(i, copies[y])
    return bool(copies)


def _turns(kept: Kept) -> list[ir.Value | None]:
    """Return, for each node in execution order, the last gradient that is computed before it; None if there is none."""
    found, last = list[ir.Value | None](), None
    for node in kept.order:
        found.append(last)
        y = node.outputs[0]
        is_gradient = (node.name or "").partition("/")[0] == _GRADIENT and not y.is_graph_output()
        if is_gradient and y.dtype == ir.DataType.FLOAT and known_bytes(y):
            last = y
    return found


def _sources(nodes: Iterable[ir.Node], copies: Iterable[ir.Value]) -> Iterable[ir.Value]:
    """Yield the inputs for which copies must wait: the largest variable of each of ``nodes`` that reads no copy."""
    made = set(copies)
    for node in nodes:
        read = list(reads(node))
        if made.isdisjoint(read):
            yield max((x for x in read if x.const_value is None), key=lambda x: known_bytes(x) or 0)
        made.update(node.outputs)


def _late(op: Builder, x: ir.Value, turn: Var) -> ir.Value:
    op.scope = AGAIN
    with op.naming_operators():
        return after(op, op.wrap(x), turn).value

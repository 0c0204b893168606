"""Tangents through If, Loop and Scan: the body computes tangents along with values.

The body is widened to ``body' = jvp(body)``: it reads the tangents of its states and slices as additional inputs, and
returns the tangents of its results as additional outputs. Nothing is saved, no iteration is computed twice, and only
one iteration's tangents are in memory. A node with the widened body replaces the original node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from gradgraph.autodiff.path import Path
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.rules.containers import cotangent_type, zeros


@dataclass(frozen=True)
class Widened:
    """A node that computes values and tangents, and will replace another node.

    Attributes:
        old: the node to replace.
        values: the new value of each output of ``old``.
        tangents: the tangent of each output of ``old`` that has one.
    """

    old: ir.Node
    values: Sequence[ir.Value]
    tangents: Mapping[ir.Value, Var]

    def take_place(self) -> None:
        """Replace ``old`` in its graph, after all tangents are written; the graph must then be sorted."""
        for y, new in zip(self.old.outputs, self.values, strict=True):
            new.name, y.name = y.name, None
            y.replace_all_uses_with(new, replace_graph_outputs=True)
        assert self.old.graph is not None
        self.old.graph.remove(self.old, safe=True)


@dataclass(frozen=True)
class Widener:
    """A writer that adds tangents to the bodies of If, Loop and Scan.

    Attributes:
        op: the builder of the graph.
        path: the path along which tangents are computed.
        tangents: the tangents written so far, by value.
        push: writes the tangents of a list of nodes with ``op``, and adds them to ``tangents``.
    """

    op: Builder
    path: Path
    tangents: dict[ir.Value, Var]
    push: Callable[[Sequence[ir.Node]], None]

    def widen(self, node: ir.Node) -> Widened:
        return _NODES[node.op_type](self, node)

    def body(self, graph: ir.Graph, moving: Sequence[ir.Value], results: Sequence[ir.Value]) -> _Body:
        """Write the tangents of ``results`` into the body ``graph``, computed from new tangents of ``moving``.

        Returns the tangents of ``moving``, which are new inputs of the body, and of ``results``, which are new outputs.
        """
        op = self.op
        outside, op.nodes = op.nodes, []
        given = [self._given(x) for x in moving]
        self.push(list(graph))
        found: dict[ir.Value, None] = {}
        tangents = [self.tangents.get(y) or zeros(op, op.wrap(y)) for y in results]
        written = set(op.nodes)
        for dy in tangents:
            own = dy.value.producer() in written and dy.value not in found
            found[(dy if own else op.Identity(dy)).value] = None
        graph.extend(op.nodes)
        op.nodes = outside
        return _Body(given, list(found))

    def _given(self, x: ir.Value) -> ir.Value:
        tangent = ir.Value(name=self.op.fresh(f"{x.name}.tangent"), type=cotangent_type(x), shape=x.shape)
        self.tangents[x] = self.op.wrap(tangent)
        return tangent

    def tangent(self, x: ir.Value | None) -> Var:
        """Return the tangent of ``x``; zeros if it has none."""
        assert x is not None
        return self.tangents.get(x) or zeros(self.op, self.op.wrap(x))

    def active(self, *values: ir.Value) -> bool:
        return any(x in self.path.active for x in values)

    def written(
        self, old: ir.Node, inputs: Sequence[ir.Value | Var | None], places: Sequence[int], moving: Mapping[int, int],
        **attrs: Any,
    ) -> Widened:  # fmt: skip
        """Emit the node that replaces ``old``.

        For each output of ``old``, ``places`` has its index among the outputs of the new node, and ``moving`` the index
        of its tangent, if any.
        """
        op = self.op
        operands = [op.wrap(x) if isinstance(x, ir.Value) else x for x in inputs]
        results = all_of(op.emit(old.op_type, *operands, outputs=len(places) + len(moving), **attrs))
        for y, place in zip(old.outputs, places, strict=True):
            results[place].value.type, results[place].value.shape = y.type, y.shape
        tangents = {old.outputs[i]: results[place] for i, place in moving.items()}
        for y, dy in tangents.items():
            dy.value.type, dy.value.shape = cotangent_type(y), y.shape
        return Widened(old, [results[place].value for place in places], tangents)


@dataclass(frozen=True)
class _Body:
    inputs: list[ir.Value]  # tangents to add to the inputs of the body
    outputs: list[ir.Value]  # tangents to add to its outputs


def _if(to: Widener, node: ir.Node) -> Widened:
    moving = [i for i, y in enumerate(node.outputs) if to.active(y)]
    branches = {name: node.attributes[name].as_graph() for name in ("then_branch", "else_branch")}
    for branch in branches.values():
        branch.outputs.extend(to.body(branch, [], [branch.outputs[i] for i in moving]).outputs)
    count = len(node.outputs)
    return to.written(node, node.inputs, range(count), {i: count + k for k, i in enumerate(moving)}, **branches)


def _loop(to: Widener, node: ir.Node) -> Widened:
    body = node.attributes["body"].as_graph()
    n, count = len(body.inputs) - 2, len(node.outputs)
    entering, leaving = body.inputs[2:], body.outputs[1:]
    states, rows = _moving(to, node, entering, leaving, n)
    new = to.body(body, [entering[i] for i in states], [leaving[i] for i in (*states, *rows)])
    body.inputs.extend(new.inputs)
    _insert(body.outputs, 1 + n, new.outputs, len(states))
    initial = [to.tangent(node.inputs[2 + i]) for i in states]
    return to.written(node, [*node.inputs, *initial], *_places(n, count, states, rows), body=body)


def _scan(to: Widener, node: ir.Node) -> Widened:
    body = node.attributes["body"].as_graph()
    scanned, count = node.attributes["num_scan_inputs"].as_int(), len(node.outputs)
    n = len(node.inputs) - scanned
    states, rows = _moving(to, node, body.inputs, body.outputs, n)
    slices = [k for k in range(n, len(node.inputs)) if to.active(body.inputs[k])]
    moving = [*states, *slices]
    new = to.body(body, [body.inputs[k] for k in moving], [body.outputs[i] for i in (*states, *rows)])
    _insert(body.inputs, n, new.inputs, len(states))
    _insert(body.outputs, n, new.outputs, len(states))
    inputs: list[ir.Value | Var | None] = list(node.inputs)
    _insert(inputs, n, [to.tangent(node.inputs[k]) for k in moving], len(states))
    attrs: dict[str, Any] = {"body": body, "num_scan_inputs": scanned + len(slices)}
    for kind, size, chosen in (("input", scanned, slices), ("output", count - n, rows)):
        for name in (f"scan_{kind}_axes", f"scan_{kind}_directions"):
            given = list(node.attributes[name].as_ints()) if name in node.attributes else [0] * size
            attrs[name] = [*given, *(given[k - n] for k in chosen)]
    return to.written(node, inputs, *_places(n, count, states, rows), **attrs)


_NODES: Mapping[str, Callable[[Widener, ir.Node], Widened]] = {"If": _if, "Loop": _loop, "Scan": _scan}
HAVE_BODIES = frozenset(_NODES)


def _moving(
    to: Widener, node: ir.Node, entering: Sequence[ir.Value], leaving: Sequence[ir.Value], n: int
) -> tuple[list[int], list[int]]:
    """Return the indices of the outputs with tangents: first of states (outputs before ``n``), then of scan outputs."""
    states = [i for i in range(n) if to.active(entering[i], leaving[i], node.outputs[i])]
    return states, [i for i in range(n, len(node.outputs)) if to.active(node.outputs[i])]


def _insert(values: Any, n: int, new: Sequence[Any], states: int) -> None:
    """Insert the first ``states`` elements of ``new`` after the first ``n`` of ``values``, and append the rest."""
    values[:] = [*values[:n], *new[:states], *values[n:], *new[states:]]


def _places(n: int, count: int, states: Sequence[int], rows: Sequence[int]) -> tuple[list[int], dict[int, int]]:
    """Return the index of each output after ``_insert``, and the index of each tangent by its output's original index.

    The first ``n`` of ``count`` outputs are states. ``states`` and ``rows`` are the states and scan outputs with
    tangents.
    """
    values = [i if i < n else i + len(states) for i in range(count)]
    tangents = {i: n + k for k, i in enumerate(states)}
    return values, tangents | {i: count + len(states) + k for k, i in enumerate(rows)}

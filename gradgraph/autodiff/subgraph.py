"""Differentiate the bodies of If, Loop and Scan, for the gradient rules of these operators."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from gradgraph.autodiff.path import Path
from gradgraph.errors import UnsupportedOperatorError
from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import DRAWING, describe, subgraphs
from gradgraph.passes.normal.functions.inline import applied
from gradgraph.rules.containers import is_optional, is_sequence

Backward = Callable[[Builder, Path, Mapping[ir.Value, Sequence[Var]]], dict[ir.Value, Var]]


@dataclass(eq=False)
class BodiesOnPath:
    """The ``registry.Bodies`` of one node of a path: differentiates the node's bodies.

    Attributes:
        path: the path being differentiated.
        node: the If, Loop or Scan.
        op: the builder of the graph.
        backward: writes the backward pass along a path; used for the bodies.
        captured: the outer values read by the bodies that get a gradient from the bodies.
    """

    path: Path
    node: ir.Node
    op: Builder
    backward: Backward
    captured: list[Var] = field(init=False)

    def __post_init__(self) -> None:
        self.captured = [self.op.wrap(v) for v in self.path.captured(self.node)]

    def active(self, value: ir.Value) -> bool:
        return value in self.path.active

    def readers(self, value: Var) -> list[ir.Node]:
        return self._readers.get(value.value, [])

    @functools.cached_property
    def _readers(self) -> dict[ir.Value | None, list[ir.Node]]:
        found: dict[ir.Value | None, list[ir.Node]] = defaultdict(list)
        for node in (n for graph in subgraphs(self.node) for n in graph.all_nodes() if self.path.is_on(n)):
            for value in set(node.inputs):
                found[value].append(node)
        return found

    def gradients(
        self, op: Builder, graph: ir.Graph, inputs: Sequence[Var], dys: Sequence[Var | None], wrt: Sequence[Var]
    ) -> list[Var | None]:
        nodes, copies = applied(graph, [x.value for x in inputs], functools.partial(op.fresh_in, op.scope))
        _refuse_random(self.node, nodes)
        op.nodes.extend(nodes)
        seeds: dict[ir.Value, list[Var]] = defaultdict(list)
        for y, dy in zip(graph.outputs, dys, strict=True):
            if dy is not None:
                result = copies.get(y, y)
                seeds[result].append(_as_here(op, dy, op.wrap(result)))
        wanted = [copies.get(x.value, x.value) for x in wrt]
        found = self.backward(op, Path(nodes, seeds, wanted), seeds)
        return [found.get(x) for x in wanted]


def _as_here(op: Builder, dy: Var, y: Var) -> Var:
    """Return ``dy``, which may have the rank of another branch's or iteration's result, in the shape of ``y``."""
    same = dy.shape is not None and y.shape is not None and dy.rank == y.rank
    if same or y.shape is None or is_sequence(y) or is_optional(y):
        return dy
    return op.like(op.Reshape(dy, op.shape(y), allowzero=1), y)


def _refuse_random(owner: ir.Node, nodes: Sequence[ir.Node]) -> None:
    """Raise an error if a body draws random numbers: recomputation in the backward pass would draw different ones."""
    inside = [*nodes, *(n for node in nodes for graph in subgraphs(node) for n in graph.all_nodes())]
    drawn = next((n for n in inside if n.domain == "" and (n.op_type in DRAWING or _drops(n))), None)
    if drawn is not None:
        raise UnsupportedOperatorError(
            f"{describe(drawn)} draws random numbers inside {describe(owner)}, whose body the backward "
            "pass recomputes; draw them outside, and let the body read them"
        )


def _drops(node: ir.Node) -> bool:
    """Whether ``node`` is a Dropout that is, or may be, in training mode."""
    training = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    known = shapes.constant_of(training)
    return training is not None and (known is None or bool(known.any()))

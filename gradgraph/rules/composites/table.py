"""The table of composites: groups of nodes that compute one well-known function, matched before differentiation.

Each composite is registered in a file of this folder; ``calls`` finds composites in a graph. A composite is matched
backwards from its last node, and has its own gradient rule::

    @composite("Silu", ["Mul"], find_silu, case(real(2, 3), graph="s = Sigmoid(x0)  y0 = Mul(x0, s)"))
    def silu(op, dy, y, x, gate): ...

The rule maps the cotangent of the last output directly to the inputs of the function. The nodes in between stay in the
graph, and get cotangents only from readers outside the composite. A backend thus does not have to recognise the
function in the gradients of its parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.patterns import MismatchError, Walk
from gradgraph.rules.registry import RULES, Case, Emit, Point, Rule, is_own


@dataclass(frozen=True)
class Found:
    """The arguments of a composite's rule.

    Attributes:
        inputs: the inputs of the function; the rule returns a gradient for each of them.
        kept: other values that the rule reads: outputs of inner nodes, or inputs without a gradient.
        attributes: the keyword arguments of the rule.
    """

    inputs: tuple[ir.Value | None, ...]
    kept: tuple[ir.Value | None, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Composite:
    """A function written as several nodes: its matcher, its gradient rule, and the rule's test cases (graphs)."""

    find: Callable[[Walk], Found]
    rule: Rule
    elementwise: bool  # elementwise in one input, so that its rule also maps tangents


@dataclass(frozen=True)
class Call:
    """An occurrence of a composite in a graph."""

    composite: Composite
    found: Found

    def gradients(self, op: Builder, dy: Var, y: Var) -> list[Var | None]:
        """Return the gradient of each of ``found.inputs``; ``dy`` and ``y`` belong to the last node's output."""
        given = [op.wrap(x) for x in (*self.found.inputs, *self.found.kept)]
        gradients = list(self.composite.rule.emit(op, dy, y, *given, **self.found.attributes))
        count = len(self.found.inputs)
        return (gradients + [None] * count)[:count]


COMPOSITES: dict[str, Composite] = {}
_BY_LAST: dict[str, list[Composite]] = defaultdict(list)


def composite(
    name: str, last: Sequence[str], find: Callable[[Walk], Found], *trials: Case | Point, elementwise: bool = False
) -> Callable[[Emit], Emit]:
    """Return a decorator that registers the gradient rule of a composite.

    The rule is a function ``(op, dy, y, *inputs, *kept, **attributes)`` that returns one gradient per input.

    Args:
        name: the name of the composite in tests.
        last: the operator types of the last node.
        find: a matcher, which walks backwards from the last node and returns the arguments of the rule, or raises
            ``MismatchError`` (using ``some`` and ``need``).
        trials: test cases and points for the rule kit, with graphs as exporters write them.
        elementwise: whether the function is elementwise in one input, so that its rule also maps tangents.
    """

    def register(emit: Emit) -> Emit:
        COMPOSITES[name] = Composite(find, Rule.of(name, emit, trials), elementwise)
        for op_type in last:
            _BY_LAST[op_type].append(COMPOSITES[name])
        assert not COMPOSITES[name].rule.whole  # one output
        return emit

    return register


def rules_with_cases() -> list[Rule]:
    """Return the rules of operators and of composites."""
    return [*RULES.values(), *(c.rule for c in COMPOSITES.values())]


def calls(nodes: Iterable[ir.Node], active: Collection[ir.Value], wrt: Collection[ir.Value]) -> dict[ir.Node, Call]:
    """Return the composites among ``nodes``, the nodes on a gradient path, by their last node.

    ``active`` are the values that have a gradient.
    """
    found = ((node, _call(node, active, wrt)) for node in nodes if node.op_type in _BY_LAST and node.domain == "")
    return {node: call for node, call in found if call is not None}


def _call(last: ir.Node, active: Collection[ir.Value], wrt: Collection[ir.Value]) -> Call | None:
    for known in _BY_LAST[last.op_type]:
        walk = Walk(last)
        try:
            found = known.find(walk)
        except MismatchError:
            continue
        if _is_whole(walk, found, active, wrt):
            return Call(known, found)
    return None


def _is_whole(walk: Walk, found: Found, active: Collection[ir.Value], wrt: Collection[ir.Value]) -> bool:
    """Whether the composite's rule may replace its nodes' rules.

    This requires that all nodes have gradgraph's own rules, and pass gradients to ``found.inputs`` only.
    """
    between = {y for node in walk.passed[1:] for y in node.outputs}
    read = {x for node in walk.passed for x in node.inputs if x is not None and x not in between}
    return (
        all(is_own(node) for node in walk.passed)
        and not any(y in wrt for y in between)
        and not any(x in active and x not in found.inputs for x in read)
    )

"""The table of composites: nodes that are one well-known function together, found before a graph is differentiated.

Each is registered in a file of this folder; ``calls`` finds them in a graph. A composite is found from its last node
backwards, and has a rule of its own::

    @composite("Silu", ["Mul"], find_silu, case(real(2, 3), graph="s = Sigmoid(x0)  y0 = Mul(x0, s)"))
    def silu(op, dy, y, x, gate): ...

The cotangent of the last output goes to what the function reads at once. The nodes between stay as they are, and have
the cotangents of their other readers only. So neither their rules nor a backend need to find the function again in the
gradients of its parts.
"""

from __future__ import annotations

import inspect
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
    """The inputs of a composite.

    Attributes:
        inputs: the rule gives a gradient for each of them.
        kept: values that the rule reads besides, of nodes between or without a gradient.
        attributes: what the rule takes by keyword.
    """

    inputs: tuple[ir.Value | None, ...]
    kept: tuple[ir.Value | None, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Composite:
    """A function of several nodes: how it is found, and its rule (with the cases, which are graphs)."""

    find: Callable[[Walk], Found]
    rule: Rule
    elementwise: bool  # of one input, each number of which decides one of the output: a tangent passes as a cotangent


@dataclass(frozen=True)
class Call:
    """A composite in a graph."""

    composite: Composite
    found: Found

    def gradients(self, op: Builder, dy: Var, y: Var) -> list[Var | None]:
        """The gradient of each of ``found.inputs``."""
        given = [op.wrap(x) for x in (*self.found.inputs, *self.found.kept)]
        gradients = list(self.composite.rule.emit(op, dy, y, *given, **self.found.attributes))
        count = len(self.found.inputs)
        return (gradients + [None] * count)[:count]


COMPOSITES: dict[str, Composite] = {}
_BY_LAST: dict[str, list[Composite]] = defaultdict(list)


def composite(
    name: str, last: Sequence[str], find: Callable[[Walk], Found], *trials: Case | Point, elementwise: bool = False
) -> Callable[[Emit], Emit]:
    """Register the rule of a composite: ``(op, dy, y, *inputs, *kept, **attributes)`` to the gradients of the inputs.

    Args:
        name: how tests and readers call it.
        last: operators of its last node.
        find: what it reads, in a walk from there; raises ``MismatchError`` (by ``some`` and ``need``) if it is another.
        trials: cases and points of the rule kit; their graphs are what users' files hold.
        elementwise: a function of one input whose rule passes tangents on as it does cotangents.
    """

    def register(emit: Emit) -> Emit:
        cases = tuple(t for t in trials if isinstance(t, Case))
        points = tuple(t for t in trials if isinstance(t, Point))
        family = emit.__module__.rsplit(".", 1)[-1]
        COMPOSITES[name] = Composite(find, Rule(name, "", emit, False, False, cases, points, family), elementwise)
        for op_type in last:
            _BY_LAST[op_type].append(COMPOSITES[name])
        assert list(inspect.signature(emit).parameters)[1] != "dys"  # one output
        return emit

    return register


def rules_with_cases() -> list[Rule]:
    """The rules of operators and of composites."""
    return [*RULES.values(), *(c.rule for c in COMPOSITES.values())]


def calls(nodes: Iterable[ir.Node], active: Collection[ir.Value], wrt: Collection[ir.Value]) -> dict[ir.Node, Call]:
    """The composites among the nodes of a path, by their last node.

    Args:
        nodes: of the path.
        active: values with a gradient.
        wrt: what is differentiated by.
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
    """Do all gradients that go through its nodes end at its inputs, and are their rules the package's own?"""
    between = {y for node in walk.passed[1:] for y in node.outputs}
    read = {x for node in walk.passed for x in node.inputs if x is not None and x not in between}
    return (
        all(is_own(node) for node in walk.passed)
        and not any(y in wrt for y in between)
        and not any(x in active and x not in found.inputs for x in read)
    )

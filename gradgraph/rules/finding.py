"""Composites: nodes that are one well-known function together, named in the forward graph before it is differentiated.

A composite is found from its last node backwards, and has a rule of its own::

    @composite("Silu", ["Mul"], find_silu, case(real(2, 3), graph="s = Sigmoid(x0)  y0 = Mul(x0, s)"))
    def silu(op, dy, y, x, gate): ...

The cotangent of the last output goes to what the function reads at once. The nodes between stay as they are, and have
the cotangents of their other readers only. So neither their rules nor a backend need to find the function again in the
gradients of its parts.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.marks import is_for_precision, is_marked_constant
from gradgraph.rules import registry
from gradgraph.rules.registry import Case, Emit, Point, Rule

_T = TypeVar("_T")


class OtherError(Exception):
    """The nodes are not what is looked for."""


def some(x: _T | None) -> _T:
    if x is None:
        raise OtherError
    return x


def need(condition: bool) -> None:
    if not condition:
        raise OtherError


class Walk:
    """A walk from the last node of a composite backwards; ``passed`` are the nodes on the way, the last one too."""

    def __init__(self, last: ir.Node) -> None:
        self.last = last
        self.passed = [last]

    def to(self, value: ir.Value | None, *op_types: str) -> ir.Node:
        """The node that computes ``value``, which is one of these operators in the same graph."""
        node = some(value).producer() if value is not None else None
        need(node is not None and is_standard(node, *op_types) and node.graph is self.last.graph)
        self.passed.append(some(node))
        return some(node)

    def first(self, finds: Callable[[_T], Found], choices: Iterable[_T]) -> Found:
        """What the first choice gives for which ``finds`` finds its nodes."""
        before = len(self.passed)
        for choice in choices:
            try:
                return finds(choice)
            except OtherError:
                del self.passed[before:]
        raise OtherError


@dataclass(frozen=True)
class Found:
    """What a composite reads.

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
        given = [None if x is None else op.wrap(x) for x in (*self.found.inputs, *self.found.kept)]
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
        find: what it reads, in a walk from there; raises ``OtherError`` (by ``some`` and ``need``) if it is another.
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
    """Those of operators, and those of composites."""
    return [*registry.RULES.values(), *(c.rule for c in COMPOSITES.values())]


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
        except OtherError:
            continue
        if _is_whole(walk, found, active, wrt):
            return Call(known, found)
    return None


def _is_whole(walk: Walk, found: Found, active: Collection[ir.Value], wrt: Collection[ir.Value]) -> bool:
    """Do all gradients that go through its nodes end at its inputs, and are their rules the package's own?"""
    between = {y for node in walk.passed[1:] for y in node.outputs}
    read = {x for node in walk.passed for x in node.inputs if x is not None and x not in between}
    return (
        all(registry.is_own(node) for node in walk.passed)
        and not any(y in wrt for y in between)
        and not any(x in active and x not in found.inputs for x in read)
    )


def need_one_rank(walk: Walk, x: ir.Value | None) -> None:
    """The output has as many axes as ``x``: a number in a formula may have more, and adds them."""
    need(len(some(shapes.shape_of(some(x)))) == len(some(shapes.shape_of(walk.last.outputs[0]))))


# --- words of patterns -----------------------------------------------------------------------------------------------


def is_standard(node: ir.Node, *op_types: str) -> bool:
    return node.domain == "" and node.op_type in op_types


def number_of(value: ir.Value | None) -> float | None:
    """The only element of ``value``, if it is a number in a formula: a weight may change."""
    producer = None if value is None else value.producer()
    if producer is not None and is_for_precision(producer):
        value = producer.inputs[0]
    if value is None or not is_marked_constant(value):
        return None
    known = shapes.constant_of(value)
    return float(known.reshape(())) if known is not None and known.size == 1 else None


def is_number(value: ir.Value | None, expected: float) -> bool:
    """Is ``value`` this number, rounded to its type?"""
    known = number_of(value)
    if value is None or known is None or value.dtype is None:
        return False
    return math.isclose(known, expected, rel_tol=4 * epsilon(value.dtype))


def epsilon(dtype: ir.DataType) -> float:
    """The distance from 1 to the next number of a floating type."""
    return {ir.DataType.DOUBLE: 2.0**-52, ir.DataType.FLOAT: 2.0**-23, ir.DataType.FLOAT16: 2.0**-10}.get(
        dtype, 2.0**-7
    )


def with_number(node: ir.Node) -> tuple[ir.Value, float]:
    """``x`` and ``c`` of a node that computes ``x·c``, ``c·x`` or ``x/c`` with a number ``c``; that of x/c as 1/c."""
    x, c = node.inputs
    if is_standard(node, "Mul") and number_of(c) is None:
        x, c = c, x
    number = some(number_of(c))
    need(is_standard(node, "Mul") or (is_standard(node, "Div") and number != 0))
    return some(x), number if node.op_type == "Mul" else 1 / number

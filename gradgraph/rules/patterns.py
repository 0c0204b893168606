"""Pattern matching on nodes: a backward walk that raises ``MismatchError`` if a node does not match."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.marks import is_for_precision, is_marked_constant
from gradgraph.graph.nodes import is_standard, made_by
from gradgraph.graph.shape_inference import shape_of

_T = TypeVar("_T")
_Result = TypeVar("_Result")


class MismatchError(Exception):
    """Raised if the nodes do not match the pattern."""


def some(x: _T | None) -> _T:
    if x is None:
        raise MismatchError
    return x


def need(condition: bool) -> None:
    if not condition:
        raise MismatchError


class Walk:
    """A backward walk from the last node of a composite; ``passed`` are the nodes visited so far."""

    def __init__(self, last: ir.Node) -> None:
        self.last = last
        self.passed = [last]

    def to(self, value: ir.Value | None, *op_types: str) -> ir.Node:
        """Return the node in this graph that computes ``value``; raise MismatchError unless it is of ``op_types``."""
        node = some(made_by(value, *op_types))
        need(node.graph is self.last.graph)
        self.passed.append(node)
        return node

    def first(self, finds: Callable[[_T], _Result], choices: Iterable[_T]) -> _Result:
        """Return the result of ``finds`` for the first of ``choices`` that matches; failed attempts are undone."""
        before = len(self.passed)
        for choice in choices:
            try:
                return finds(choice)
            except MismatchError:
                del self.passed[before:]
        raise MismatchError


def number_of(value: ir.Value | None) -> float | None:
    """Return the number if ``value`` is a constant with one element, else None. Weights are not constants."""
    producer = None if value is None else value.producer()
    if producer is not None and is_for_precision(producer):
        value = producer.inputs[0]
    if value is None or not is_marked_constant(value):
        return None
    known = shapes.constant_of(value)
    return float(known.reshape(())) if known is not None and known.size == 1 else None


def is_number(value: ir.Value | None, expected: float) -> bool:
    """Whether ``value`` is a constant equal to ``expected``, up to rounding in its type."""
    known = number_of(value)
    if value is None or known is None or value.dtype is None:
        return False
    return math.isclose(known, expected, rel_tol=4 * epsilon(value.dtype))


def epsilon(dtype: ir.DataType) -> float:
    """Return the distance from 1 to the next larger number of a floating-point type."""
    return {ir.DataType.DOUBLE: 2.0**-52, ir.DataType.FLOAT: 2.0**-23, ir.DataType.FLOAT16: 2.0**-10}.get(
        dtype, 2.0**-7
    )


def with_number(node: ir.Node) -> tuple[ir.Value, float]:
    """Return (x, c) for a node ``x·c`` or ``c·x`` with a constant c, and (x, 1/c) for ``x/c``."""
    x, c = node.inputs
    if is_standard(node, "Mul") and number_of(c) is None:
        x, c = c, x
    number = some(number_of(c))
    need(is_standard(node, "Mul") or (is_standard(node, "Div") and number != 0))
    return some(x), number if node.op_type == "Mul" else 1 / number


def need_one_rank(walk: Walk, x: ir.Value | None) -> None:
    """Raise MismatchError if broadcasting with a constant gave the last node's output more axes than ``x``."""
    need(len(some(shape_of(some(x)))) == len(some(shape_of(walk.last.outputs[0]))))

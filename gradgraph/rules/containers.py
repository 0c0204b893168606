"""Helpers for gradients of sequences and optionals.

The gradient of a sequence is a sequence of gradients; the gradient of an optional is the gradient of its content.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var

INT64 = ir.TensorType(ir.DataType.INT64)
BOOL = ir.TensorType(ir.DataType.BOOL)


def is_sequence(x: Var) -> bool:
    return isinstance(x.value.type, ir.SequenceType)


def is_optional(x: Var) -> bool:
    return isinstance(x.value.type, ir.OptionalType)


def cotangent_type(x: ir.Value) -> ir.TypeProtocol | None:
    """Return the type of a value's gradient: its own type, or that of an optional's content; None if unknown."""
    return x.type.elem_type if isinstance(x.type, ir.OptionalType) else x.type


def typed(x: Var, like: Var) -> Var:
    """Return ``x``, with its type and shape set to those of ``like``.

    The shape of a sequence is the common shape of its elements.
    """
    x.value.type, x.value.shape = like.value.type, like.value.shape
    return x


def element(op: Builder, sequence: Var, place: Var) -> Var:
    """Return the element of ``sequence`` at index ``place``, with its type and shape set."""
    x = op.SequenceAt(sequence, place)
    x.value.type, x.value.shape = ir.TensorType(sequence.dtype), sequence.value.shape
    return x


def inserted(op: Builder, sequence: Var, x: Var, place: Var | None = None) -> Var:
    return typed(op.SequenceInsert(sequence, x, place), sequence)


def erased(op: Builder, sequence: Var, place: Var | int) -> Var:
    return typed(op.SequenceErase(sequence, place), sequence)


def empty(op: Builder, like: Var) -> Var:
    """Return an empty sequence of tensors with the element type of ``like``."""
    sequence = op.SequenceEmpty(dtype=int(like.dtype))
    sequence.value.type = ir.SequenceType(ir.TensorType(like.dtype))
    return sequence


def counters(number: str) -> list[ir.Value]:
    """Return the first two inputs of a Loop's body: the iteration number, named ``number``, and the condition."""
    return [ir.Value(name=number, type=INT64, shape=ir.Shape([])), ir.Value(name="go", type=BOOL, shape=ir.Shape([]))]


def extended(op: Builder, start: Var, count: Var, write: Callable[[Var], Var]) -> Var:
    """Return the sequence ``start``, extended by ``write(i)`` for each i from 0 to ``count`` − 1."""
    body = op.graph(
        [*counters("place"), ir.Value(name="done", type=start.value.type)],
        lambda place, go, done: [go, inserted(op, done, write(place))],
        "extend",
    )
    result = op.Loop(count, True, start, body=body)
    return typed(result, start)


def mapped(op: Builder, sequence: Var, write: Callable[[Var], Var]) -> Var:
    """Return the sequence of ``write(i)`` for every index i of ``sequence``; its elements must have the same type."""
    return typed(extended(op, empty(op, sequence), op.SequenceLength(sequence), write), sequence)


def zeros(op: Builder, x: Var) -> Var:
    """Return zeros shaped like a tensor, like the content of an optional, or like each element of a sequence."""
    if is_sequence(x):
        return mapped(op, x, lambda place: op.zeros_like(element(op, x, place)))
    return op.zeros_like(content(op, x) if is_optional(x) else x)


def joined(op: Builder, sequence: Var, axis: int, new_axis: bool) -> Var:
    """Return the elements of ``sequence``, concatenated along ``axis`` or stacked along a new axis."""
    x = op.ConcatFromSequence(sequence, axis=axis, new_axis=int(new_axis))
    x.value.type = ir.TensorType(sequence.dtype)
    return x


def sizes(op: Builder, sequence: Var, axis: int) -> Var:
    """Return the size of every element of a sequence along ``axis``, as an int64 vector."""
    body = op.graph(
        counters("place"),
        lambda place, go: [go, op.Gather(op.Shape(element(op, sequence, place)), axis)],
        "sizes",
    )
    vector = op.Loop(op.SequenceLength(sequence), True, body=body)
    vector.value.type, vector.value.shape = INT64, ir.Shape([None])
    return vector


def content(op: Builder, optional: Var) -> Var:
    x = op.OptionalGetElement(optional)
    assert isinstance(optional.value.type, ir.OptionalType)
    x.value.type, x.value.shape = optional.value.type.elem_type, optional.value.shape
    return x


def added(op: Builder, a: Var, b: Var) -> Var:
    """Return the sum of two cotangents; for sequences, element by element."""
    if is_sequence(a):
        return mapped(op, a, lambda place: op.Add(element(op, a, place), element(op, b, place)))
    return op.sum_of([a, b])

"""Recognise Softmax and Sigmoid that an exporter decomposed, into exponentials, a sum and a quotient for example."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.graph.nodes import is_standard, made_by
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import constant_of
from gradgraph.rules.patterns import MismatchError, need, some

_BROADCAST = ("Expand", "Identity", "Reshape", "Unsqueeze")  # operators that restore an axis removed by a reduction


Signed = tuple[ir.Value, bool]  # (z, False) is z, (z, True) is −z


def softmax_of(value: ir.Value) -> tuple[ir.Value, int] | None:
    """Return the logits and the axis if ``value`` is a decomposed Softmax, else None."""
    try:
        return _softmax(value)
    except MismatchError:
        return None


def sigmoid_of(value: ir.Value) -> Signed | None:
    """Return the logits of a decomposed Sigmoid, and whether they are negated; None for other values."""
    for form in (_logistic, _odds, _by_tanh, _by_softplus, _by_halves):
        try:
            return form(value)
        except MismatchError:
            continue
    return None


# --- Softmax: exp(z) / Σ exp(z), exp(log_softmax(z)), exp(z − log Σ exp(z)) ----------------------------------------


def _softmax(value: ir.Value) -> tuple[ir.Value, int]:
    if (node := made_by(value, "Exp")) is not None:
        return _of_logarithm(some(node.inputs[0]))
    powers, total = _quotient(value)
    axis = _reduced(total, "ReduceSum", powers)
    return _unshifted(some(some(made_by(powers, "Exp")).inputs[0]), axis), axis


def _of_logarithm(logarithm: ir.Value) -> tuple[ir.Value, int]:
    if (node := made_by(logarithm, "LogSoftmax")) is not None:
        given = node.attributes.get("axis")
        return some(node.inputs[0]), -1 if given is None else given.as_int()
    z, total = some(made_by(logarithm, "Sub")).inputs
    return some(z), _reduced(some(total), "ReduceLogSumExp", some(z))


def _unshifted(x: ir.Value, axis: int) -> ir.Value:
    """Return ``z`` if ``x`` is ``z − max(z)`` along ``axis``, as in a stable Softmax; else ``x``."""
    if (node := made_by(x, "Sub")) is None:
        return x
    z, greatest = map(some, node.inputs)
    try:
        need(_reduced(greatest, "ReduceMax", z) == axis)
    except MismatchError:
        return x
    return z


def _reduced(value: ir.Value, op_type: str, of: ir.Value) -> int:
    """Return the axis along which ``op_type`` reduces ``of`` to ``value``, or raise ``MismatchError``.

    The reduction must have a single axis and keep it with length 1.
    """
    shape, whole = shape_of(value), some(shape_of(of))
    while (node := made_by(value, *_BROADCAST)) is not None:
        value = some(node.inputs[0])
    node = some(made_by(value, op_type))
    need(node.inputs[0] is of)
    given = node.attributes.get("axes")
    read = constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    axes = [int(a) for a in (read.ravel() if read is not None else [] if given is None else given.as_ints())]
    need(len(axes) == 1)
    axis = axes[0] % len(whole)
    need(shape is not None and len(shape) == len(whole) and shape[axis] == 1)
    return axis


# --- Sigmoid: 1 / (1 + exp(−z)), exp(z) / (1 + exp(z)), (1 + tanh(z/2)) / 2, exp(−softplus(−z)) -------------------


def _logistic(value: ir.Value) -> Signed:
    one, below = _quotient(value)
    need(_is(one, 1.0))
    return _negative(_power(_other_operand(below, "Add", 1.0)))


def _odds(value: ir.Value) -> Signed:
    above, below = _quotient(value)
    z = _power(above)
    need(_power(_other_operand(below, "Add", 1.0)) is z)
    return z, False


def _by_tanh(value: ir.Value) -> Signed:
    try:
        inner = _other_operand(_other_operand(value, "Mul", 0.5), "Add", 1.0)
    except MismatchError:
        inner = _other_operand(_other_operand(value, "Add", 0.5), "Mul", 0.5)
    return _other_operand(some(some(made_by(inner, "Tanh")).inputs[0]), "Mul", 0.5), False


def _by_softplus(value: ir.Value) -> Signed:
    return _negative(some(some(made_by(_minus(_power(value)), "Softplus")).inputs[0]))


def _by_halves(value: ir.Value) -> Signed:
    """Return the logits of a Sigmoid in the stable form ``Where(z ≥ 0, …, …)``, and whether they are negated."""
    node = some(made_by(value, "Where"))
    first, second = (some(sigmoid_of(some(x))) for x in node.inputs[1:])
    need(first == second)
    return first


def _negative(value: ir.Value) -> Signed:
    """Return −``value`` as (x, negated): (z, False) if ``value`` is −z, otherwise (``value``, True)."""
    try:
        return _minus(value), False
    except MismatchError:
        return value, True


# --- helpers --------------------------------------------------------------------------------------------------------


def _quotient(value: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the dividend and the divisor if ``value`` is a quotient, else raise ``MismatchError``."""
    node = some(made_by(value, "Div", "Mul", "Reciprocal"))
    if is_standard(node, "Div"):
        return some(node.inputs[0]), some(node.inputs[1])
    if is_standard(node, "Reciprocal"):
        return _ONE, some(node.inputs[0])
    for above, inverse in (node.inputs, node.inputs[::-1]):
        if (below := made_by(inverse, "Reciprocal")) is not None:
            return some(above), some(below.inputs[0])
    raise MismatchError


_ONE = ir.Value(name="one", const_value=ir.tensor(np.float32(1.0)))


def _power(value: ir.Value) -> ir.Value:
    """Return ``z`` if ``value`` is exp(z), else raise ``MismatchError``."""
    return some(some(made_by(value, "Exp")).inputs[0])


def _minus(value: ir.Value) -> ir.Value:
    """Return ``z`` if ``value`` is −z, else raise ``MismatchError``."""
    if (node := made_by(value, "Neg")) is not None:
        return some(node.inputs[0])
    if (node := made_by(value, "Sub")) is not None:
        need(_is(node.inputs[0], 0.0))
        return some(node.inputs[1])
    return _other_operand(value, "Mul", -1.0)


def _other_operand(value: ir.Value, op_type: str, number: float) -> ir.Value:
    """Return ``x`` if ``value`` is ``op_type`` of ``x`` and the constant ``number``; ``x/2`` counts as ``x·0.5``."""
    node = made_by(value, op_type)
    if node is None:
        node = some(made_by(value, "Div") if op_type == "Mul" else None)
        need(_is(node.inputs[1], 1.0 / number))
        return some(node.inputs[0])
    for x, c in (node.inputs, node.inputs[::-1]):
        if _is(c, number):
            return some(x)
    raise MismatchError


def _is(value: ir.Value | None, number: float) -> bool:
    known = constant_of(value)
    return known is not None and known.size == 1 and float(known.reshape(())) == number

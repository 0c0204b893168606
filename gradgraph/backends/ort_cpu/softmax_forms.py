"""Softmax and cross-entropy per pixel: few classes, not on the last axis; and Softmax of masked rows.

onnxruntime's LogSoftmax transposes the classes to the end and back; its ScatterElements and Where run on one thread.

Measured with onnxruntime 1.31 on two AVX512 cores, float32.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.backends.forms import Call
from gradgraph.backends.ort_cpu.cpu_table import form
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.nodes import made_by
from gradgraph.rules.registry import case, real, uniform

MOST_CLASSES = 64  # maximum number of classes for which passes over all of them pay


def _few_classes_in_front(call: Call) -> bool:
    return _classes(call.inputs[0], call.attrs.get("axis", -1)) <= MOST_CLASSES


def _classes(x: Var | None, axis: int) -> int:
    """Return the size of ``axis``; MOST_CLASSES + 1 if it is unknown or the last axis, or ``x`` is not float32."""
    dims = () if x is None else x.shape or ()
    if x is None or not dims or axis % len(dims) == len(dims) - 1 or x.value.dtype != ir.DataType.FLOAT:
        return MOST_CLASSES + 1
    count = dims[axis]
    return count if isinstance(count, int) else MOST_CLASSES + 1


@form(
    "LogSoftmax",
    case(uniform(-200.0, 200.0, 2, 3, 4), axis=1),
    case(real(5, 2, 3, 2), axis=-3),
    when=_few_classes_in_front,
)
def across_classes(op: Builder, x: Var, *, axis: int = -1) -> Var | None:
    """Compute LogSoftmax by reductions; None if there are more than ``MOST_CLASSES`` classes.

    It takes 0.2 of the operator's time for 2 classes of 8 images of 128 px.
    """
    if _classes(x, axis) > MOST_CLASSES:
        return None
    centred = x - op.ReduceMax(x, [axis], keepdims=1)
    return centred - op.Log(op.ReduceSum(op.Exp(centred), [axis], keepdims=1))


_GUARD = "zero = Constant <value = real {0.0}> () p = Softmax (x0) n = IsNaN (p) y0 = Where (n, zero, p)"
_MASKED = np.array([[-np.inf] * 3, [-np.inf, 0.0, 1.0], [0.0, np.nan, 1.0], [0.0, -200.0, 1.0]])


@form("Where", case(_MASKED, graph=_GUARD))
def above_threshold(op: Builder, is_nan: Var, zero: Var, p: Var) -> Var | None:
    """Compute ``Where(IsNaN(p), 0, p)`` of a Softmax, as in PyTorch's attention, by a ThresholdedRelu at 0.

    NaN is not above 0, and no probability is below. For 24 x 512 x 512 numbers, this takes 0.9 to 1.3 ms, and Where
    7.8 ms. None for other nodes.
    """
    asked, given = made_by(is_nan.value, "IsNaN"), zero.const
    if asked is None or asked.inputs[0] is not p.value or made_by(p.value, "Softmax") is None or given is None:
        return None
    is_zero = given.size == 1 and not given.any() and given.ndim <= p.rank
    return op.ThresholdedRelu(p, alpha=0.0) if is_zero and p.value.dtype == ir.DataType.FLOAT else None


@form(
    "CrossEntropyGrad",
    case(uniform(-3.0, -0.1, 2, 3, 4), [[[1, -2, 0, -1]], [[0, 1, 2, 1]]], real(2, 1, 4), axis=1),
    when=_few_classes_in_front,
)
def compared_with_classes(op: Builder, log_p: Var, places: Var, d: Var, *, axis: int) -> Var | None:
    """Compute CrossEntropyGrad, ``d·(onehot − p)``, by comparing labels with class indices.

    This takes 0.3 of the time of the portable form. None if there are more than ``MOST_CLASSES`` classes.
    """
    count = _classes(log_p, axis)
    if count > MOST_CLASSES:
        return None
    column = np.arange(count).reshape([count if i == axis % log_p.rank else 1 for i in range(log_p.rank)])
    from_start = places + op.cast(op.Less(places, 0), places.dtype) * count  # Where is several times slower
    chosen = op.cast(op.Equal(from_start, op.const(column, places.dtype)), log_p.dtype)
    return d * (chosen - op.Exp(log_p))

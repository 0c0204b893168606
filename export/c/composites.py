"""Formulas that express composite operators with simpler ones.

Each is a function of a Builder, the node's inputs and its attributes, and returns the node's outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.backends.shared_forms import batch_norm_by_statistics, written_out_batch_norm, written_out_layer_norm
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.operator_table import OperatorTable
from gradgraph.graph.quantisers import INTEGER_RANGES
from gradgraph.rules.norm import columns, inverse_deviation
from gradgraph.rules.recurrent_layer import scan, times

Written = Var | tuple[Var | None, ...]
Formula = Callable[..., Written | None]  # None if the attributes are not supported

FORMULAS = OperatorTable[Formula]()

# --- normalisation ----------------------------------------------------------------------------------------


@FORMULAS("Softmax")
def softmax(op: Builder, x: Var, *, axis: int = -1) -> Written | None:
    if x.dtype == ir.DataType.FLOAT:
        return None  # there is a kernel
    e = op.Exp(x - op.ReduceMax(x, [axis], keepdims=1))
    return e / op.ReduceSum(e, [axis], keepdims=1)


@FORMULAS("LogSoftmax")
def log_softmax(op: Builder, x: Var, *, axis: int = -1) -> Written | None:
    if x.dtype == ir.DataType.FLOAT:
        return None
    d = x - op.ReduceMax(x, [axis], keepdims=1)
    return d - op.Log(op.ReduceSum(op.Exp(d), [axis], keepdims=1))


@FORMULAS("ReduceLogSumExp")
def log_sum_exp(op: Builder, x: Var, axes: Var | None = None, *, keepdims: int = 1, **_: Any) -> Var:
    top = op.ReduceMax(x, axes, keepdims=1)
    top = op.Where(op.IsInf(top), op.zeros_like(top), top)  # the difference of two infinities is NaN
    total = op.Log(op.ReduceSum(op.Exp(x - top), axes, keepdims=1)) + top
    return total if keepdims else op.Squeeze(total, axes)


@FORMULAS("BatchNormalization")
def batch_normalization(op: Builder, *inputs: Var, **attributes: Any) -> Written | None:
    write = written_out_batch_norm if attributes.get("training_mode", 0) else batch_norm_by_statistics
    return write(op, *inputs, **attributes)


FORMULAS["LayerNormalization"] = written_out_layer_norm


@FORMULAS("InstanceNormalization")
def instance_normalization(op: Builder, x: Var, scale: Var, bias: Var, *, epsilon: float = 1e-5) -> Var:
    axes = list(range(2, x.rank))
    centred = x - op.ReduceMean(x, axes, keepdims=1)
    inverse = inverse_deviation(op, op.ReduceMean(centred * centred, axes, keepdims=1), epsilon)
    return centred * inverse * columns(op, scale, x) + columns(op, bias, x)


@FORMULAS("GlobalAveragePool")
def global_average_pool(op: Builder, x: Var) -> Var:
    return op.ReduceMean(x, list(range(2, x.rank)), keepdims=1)


@FORMULAS("GlobalMaxPool")
def global_max_pool(op: Builder, x: Var) -> Var:
    return op.ReduceMax(x, list(range(2, x.rank)), keepdims=1)


# --- quantization -----------------------------------------------------------------------------------------


@FORMULAS("QuantizeLinear")
def quantizetimes(
    op: Builder, x: Var, scale: Var, zero_point: Var | None = None, *, axis: int = 1, **options: Any
) -> Written | None:
    kind = ir.DataType(options.get("output_dtype", 0) or ir.DataType.UINT8) if zero_point is None else zero_point.dtype
    if options.get("block_size", 0) or kind not in INTEGER_RANGES or kind.bitwidth < 8 or x.rank is None:
        return None
    rows = [1] * x.rank
    if scale.rank == 1 and x.rank:
        rows[axis % x.rank] = -1
        scale = op.Reshape(scale, rows)
        zero_point = None if zero_point is None else op.Reshape(zero_point, rows)
    rounded = op.Round(x / scale)
    if zero_point is not None:
        rounded = rounded + op.Cast(zero_point, to=int(x.dtype))
    lowest, highest = INTEGER_RANGES[kind]
    return op.Cast(op.Clip(rounded, float(lowest), float(highest)), to=int(kind))


# --- recurrent layers -------------------------------------------------------------------------------------

Cell = Callable[..., Sequence[Var]]


def _plain(attributes: dict[str, Any], names: Sequence[str], count: int) -> bool:
    """Whether the layer has default activations, the layout [steps, batch, ...] and no clip."""
    given = [str(a).lower() for a in attributes.get("activations") or [*names] * count]
    return (
        given[: len(names) * count] == [*names] * count
        and not attributes.get("clip")
        and not attributes.get("layout", 0)
    )


def _recurrent(
    op: Builder, inputs: Sequence[Var | None], attributes: dict[str, Any], names: Sequence[str], states: int, cell: Cell
) -> Written | None:
    """Express a recurrent layer as one Scan per direction; ``cell`` maps (x, W, R, biases) to the next states."""
    X, W, R, B, lengths, *first = (*inputs, *[None] * 8)[: 5 + states]
    peepholes = (*inputs, *[None] * 8)[7] if states == 2 else None
    assert X is not None and W is not None and R is not None
    direction = attributes.get("direction", "forward")
    count = 2 if direction == "bidirectional" else 1
    if lengths is not None or peepholes is not None or not _plain(attributes, names, count):
        return None
    if X.shape is None or R.shape is None:
        return None
    batch, units = X.shape[1], R.shape[2]
    if not isinstance(batch, int) or not isinstance(units, int):
        return None
    zeros = op.const(np.zeros((batch, units), np.float32))
    sides = []
    for d in range(count):
        begin = [zeros if s is None else _side(op, s, d) for s in first]
        biases = (None, None) if B is None else op.Split(_side(op, B, d), num_outputs=2, outputs=2)
        step = functools.partial(_step, op, cell, _side(op, W, d), _side(op, R, d), biases)
        sides.append(scan(op, step, begin, [X], direction == "reverse" or d == 1))
    *lasts, ys = zip(*sides, strict=True)
    return tuple(_joined(op, values, axis) for values, axis in ((ys, 1), *((last, 0) for last in lasts)))


def _joined(op: Builder, directions: Sequence[Var], axis: int) -> Var:
    parts = [op.Unsqueeze(v, [axis]) for v in directions]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)


def _step(op: Builder, cell: Cell, W: Var, R: Var, biases: tuple[Var | None, Var | None], *values: Var) -> list[Var]:
    *before, x = values
    after = cell(op, x, before, W, R, biases)
    return [*after, after[0]]


def _side(op: Builder, v: Var, direction: int) -> Var:
    return op.Squeeze(op.Slice(v, [direction], [direction + 1], [0]), [0])


def _gates(op: Builder, x: Var, count: int) -> tuple[Var, ...]:
    return tuple(all_of(op.Split(x, axis=-1, num_outputs=count, outputs=count)))


@FORMULAS("LSTM")
def lstm(op: Builder, *inputs: Var | None, **attributes: Any) -> Written | None:
    def cell(op: Builder, x: Var, before: list[Var], W: Var, R: Var, biases: Any) -> Sequence[Var]:
        h, c = before
        Wb, Rb = biases
        i, o, f, g = _gates(op, times(op, x, W, Wb) + times(op, h, R, Rb), 4)
        c = op.Sigmoid(f) * c + op.Sigmoid(i) * op.Tanh(g)
        return op.Sigmoid(o) * op.Tanh(c), c

    if attributes.get("input_forget", 0):
        return None
    return _recurrent(op, inputs, attributes, ("sigmoid", "tanh", "tanh"), 2, cell)


@FORMULAS("GRU")
def gru(op: Builder, *inputs: Var | None, **attributes: Any) -> Written | None:
    after = bool(attributes.get("linear_before_reset", 0))

    def cell(op: Builder, x: Var, before: list[Var], W: Var, R: Var, biases: Any) -> Sequence[Var]:
        (h,) = before
        Wb, Rb = biases
        xz, xr, xn = _gates(op, times(op, x, W, Wb), 3)
        if after:
            hz, hr, hn = _gates(op, times(op, h, R, Rb), 3)
            z, r = op.Sigmoid(xz + hz), op.Sigmoid(xr + hr)
            n = op.Tanh(xn + r * hn)
        else:
            Rz, Rr, Rn = op.Split(R, axis=0, num_outputs=3, outputs=3)
            bz, br, bn = (None,) * 3 if Rb is None else op.Split(Rb, axis=0, num_outputs=3, outputs=3)
            z = op.Sigmoid(xz + times(op, h, Rz, bz))
            r = op.Sigmoid(xr + times(op, h, Rr, br))
            n = op.Tanh(xn + times(op, r * h, Rn, bn))
        return [(1.0 - z) * n + z * h]

    return _recurrent(op, inputs, attributes, ("sigmoid", "tanh"), 1, cell)


@FORMULAS("RNN")
def rnn(op: Builder, *inputs: Var | None, **attributes: Any) -> Written | None:
    def cell(op: Builder, x: Var, before: list[Var], W: Var, R: Var, biases: Any) -> Sequence[Var]:
        Wb, Rb = biases
        return [op.Tanh(times(op, x, W, Wb) + times(op, before[0], R, Rb))]

    return _recurrent(op, inputs, attributes, ("tanh",), 1, cell)

"""Formulas that express composite operators with simpler ones.

Each is a function of a Builder, the node's inputs and its attributes, and returns the node's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.backends.shared_forms import batch_norm_by_statistics, written_out_batch_norm, written_out_layer_norm
from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.quantisers import INTEGER_RANGES
from gradgraph.rules.norm import columns, inverse_deviation

Written = Var | tuple[Var | None, ...]
Formula = Callable[..., Written | None]  # None if the attributes are not supported

FORMULAS: dict[str, Formula] = {}


def formula(*op_types: str) -> Callable[[Formula], Formula]:
    def register(write: Formula) -> Formula:
        FORMULAS.update(dict.fromkeys(op_types, write))
        return write

    return register


# --- normalisation ----------------------------------------------------------------------------------------


@formula("Softmax")
def softmax(op: Builder, x: Var, *, axis: int = -1) -> Var:
    e = op.Exp(x - op.ReduceMax(x, [axis], keepdims=1))
    return e / op.ReduceSum(e, [axis], keepdims=1)


@formula("LogSoftmax")
def log_softmax(op: Builder, x: Var, *, axis: int = -1) -> Var:
    d = x - op.ReduceMax(x, [axis], keepdims=1)
    return d - op.Log(op.ReduceSum(op.Exp(d), [axis], keepdims=1))


@formula("ReduceLogSumExp")
def log_sum_exp(op: Builder, x: Var, axes: Var | None = None, *, keepdims: int = 1, **_: Any) -> Var:
    top = op.ReduceMax(x, axes, keepdims=1)
    total = op.Log(op.ReduceSum(op.Exp(x - top), axes, keepdims=1)) + top
    return total if keepdims else op.Squeeze(total, axes)


@formula("BatchNormalization")
def batch_normalization(op: Builder, *inputs: Var, **attributes: Any) -> Written | None:
    write = written_out_batch_norm if attributes.get("training_mode", 0) else batch_norm_by_statistics
    return write(op, *inputs, **attributes)


FORMULAS["LayerNormalization"] = written_out_layer_norm


@formula("InstanceNormalization")
def instance_normalization(op: Builder, x: Var, scale: Var, bias: Var, *, epsilon: float = 1e-5) -> Var:
    axes = list(range(2, x.rank))
    centred = x - op.ReduceMean(x, axes, keepdims=1)
    inverse = inverse_deviation(op, op.ReduceMean(centred * centred, axes, keepdims=1), epsilon)
    return centred * inverse * columns(op, scale, x) + columns(op, bias, x)


@formula("GlobalAveragePool")
def global_average_pool(op: Builder, x: Var) -> Var:
    return op.ReduceMean(x, list(range(2, x.rank)), keepdims=1)


@formula("GlobalMaxPool")
def global_max_pool(op: Builder, x: Var) -> Var:
    return op.ReduceMax(x, list(range(2, x.rank)), keepdims=1)


# --- quantization -----------------------------------------------------------------------------------------


@formula("QuantizeLinear")
def quantize_linear(
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
    known = X.shape, R.shape
    if known[0] is None or known[1] is None:
        return None
    batch, units = known[0][1], known[1][2]
    if not isinstance(batch, int) or not isinstance(units, int):
        return None
    zeros = op.const(np.zeros((batch, units), np.float32))
    sides = []
    for d in range(count):
        begin = [zeros if s is None else _side(op, s, d) for s in first]
        weights = _side(op, W, d), _side(op, R, d), None if B is None else _side(op, B, d)
        sides.append(_direction(op, X, weights, begin, cell, direction == "reverse" or d == 1))
    ys = [op.Unsqueeze(side[0], [1]) for side in sides]
    lasts = [[op.Unsqueeze(side[1 + k], [0]) for side in sides] for k in range(states)]
    y = ys[0] if count == 1 else op.Concat(*ys, axis=1)
    return (y, *(last[0] if count == 1 else op.Concat(*last, axis=0) for last in lasts))


def _side(op: Builder, v: Var, direction: int) -> Var:
    return op.Squeeze(op.Slice(v, [direction], [direction + 1], [0]), [0])


def _direction(
    op: Builder, X: Var, weights: tuple[Var, Var, Var | None], begin: list[Var], cell: Cell, backwards: bool
) -> tuple[Var, ...]:
    """Return the outputs of all steps and the final states of one direction."""
    W, R, B = weights
    half = None if B is None else op.Split(B, num_outputs=2, outputs=2)
    states = [_inside(s, s.shape) for s in begin]
    x = _inside(X, None if X.shape is None else X.shape[1:])

    def step(*values: Var) -> list[Var]:
        *before, x = values
        after = list(cell(op, x, before, W, R, half))
        return [*after, op.Identity(after[0])]

    body = op.graph([*states, x], step)
    for inner in body.outputs:
        shapes.record_shape(inner, begin[0].shape or ())
        inner.type = ir.TensorType(ir.DataType.FLOAT)
    results = op.Scan(
        *begin,
        X,
        outputs=len(body.outputs),
        body=body,
        num_scan_inputs=1,
        scan_input_directions=[int(backwards)],
        scan_output_directions=[int(backwards)],
    )
    *last, y = all_of(results)
    for result, value in zip(last, begin, strict=True):
        op.like(result, value)
    y.value.type = ir.TensorType(ir.DataType.FLOAT)
    if X.shape is not None and begin[0].shape is not None:
        shapes.record_shape(y.value, (X.shape[0], *begin[0].shape))
    return (y, *last)


def _inside(x: Var, shape: shapes.Shape | None) -> ir.Value:
    value = ir.Value(name="step", type=ir.TensorType(x.dtype))
    if shape is not None:
        shapes.record_shape(value, shape)
    return value


def _linear(op: Builder, x: Var, weight: Var, bias: Var | None) -> Var:
    made = op.MatMul(x, op.Transpose(weight, perm=[1, 0]))
    return made if bias is None else made + bias


def _gates(op: Builder, x: Var, count: int) -> tuple[Var, ...]:
    return tuple(all_of(op.Split(x, axis=-1, num_outputs=count, outputs=count)))


@formula("LSTM")
def lstm(op: Builder, *inputs: Var | None, **attributes: Any) -> Written | None:
    def cell(op: Builder, x: Var, before: list[Var], W: Var, R: Var, biases: Any) -> Sequence[Var]:
        h, c = before
        Wb, Rb = biases or (None, None)
        i, o, f, g = _gates(op, _linear(op, x, W, Wb) + _linear(op, h, R, Rb), 4)
        c = op.Sigmoid(f) * c + op.Sigmoid(i) * op.Tanh(g)
        return op.Sigmoid(o) * op.Tanh(c), c

    if attributes.get("input_forget", 0):
        return None
    return _recurrent(op, inputs, attributes, ("sigmoid", "tanh", "tanh"), 2, cell)


@formula("GRU")
def gru(op: Builder, *inputs: Var | None, **attributes: Any) -> Written | None:
    after = bool(attributes.get("linear_before_reset", 0))

    def cell(op: Builder, x: Var, before: list[Var], W: Var, R: Var, biases: Any) -> Sequence[Var]:
        (h,) = before
        Wb, Rb = biases or (None, None)
        xz, xr, xn = _gates(op, _linear(op, x, W, Wb), 3)
        if after:
            hz, hr, hn = _gates(op, _linear(op, h, R, Rb), 3)
            z, r = op.Sigmoid(xz + hz), op.Sigmoid(xr + hr)
            n = op.Tanh(xn + r * hn)
        else:
            Rz, Rr, Rn = op.Split(R, axis=0, num_outputs=3, outputs=3)
            bz, br, bn = (None,) * 3 if Rb is None else op.Split(Rb, axis=0, num_outputs=3, outputs=3)
            z = op.Sigmoid(xz + _linear(op, h, Rz, bz))
            r = op.Sigmoid(xr + _linear(op, h, Rr, br))
            n = op.Tanh(xn + _linear(op, r * h, Rn, bn))
        return [(1.0 - z) * n + z * h]

    return _recurrent(op, inputs, attributes, ("sigmoid", "tanh"), 1, cell)


@formula("RNN")
def rnn(op: Builder, *inputs: Var | None, **attributes: Any) -> Written | None:
    def cell(op: Builder, x: Var, before: list[Var], W: Var, R: Var, biases: Any) -> Sequence[Var]:
        Wb, Rb = biases or (None, None)
        return [op.Tanh(_linear(op, x, W, Wb) + _linear(op, before[0], R, Rb))]

    return _recurrent(op, inputs, attributes, ("tanh",), 1, cell)

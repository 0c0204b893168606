"""Forms of sums as matrix products, and of matrix products with an added tensor.

Measured with onnxruntime 1.31 on two AVX512 cores, float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.backends.forms import Call
from gradgraph.backends.ort_cpu.cpu_table import form
from gradgraph.backends.ort_operators import matmul
from gradgraph.files.large_weights import large_in_file
from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.nodes import before_swap, only_reader
from gradgraph.graph.shape_inference import shape_of
from gradgraph.rules.registry import case, real

FEWEST_ROWS, MOST_ROWS = 8, 1 << 20  # of ``row_of_ones``, whose ones are a constant of the step


def _rows(x: Var | None, axes: Var | None) -> int:
    """Return the number of rows of ``x`` to sum if ``axes`` are its leading axes and its sizes are known; else 0."""
    known = None if axes is None else axes.const
    if x is None or known is None or not shapes.is_static(x.shape):
        return 0
    chosen = sorted(int(a) % x.rank for a in known.reshape(-1))
    leading = bool(chosen) and chosen == list(range(len(chosen))) and len(chosen) < x.rank
    return (
        math.prod(shapes.known_sizes(x.shape)[: len(chosen)]) if leading and x.value.dtype == ir.DataType.FLOAT else 0
    )


@form(
    "ReduceSum",
    case(real(6, 5), [0], keepdims=0),
    case(real(2, 3, 5), [1, 0], keepdims=0),
    case(real(2, 3, 5), [0, -2]),
    case(real(4, 3, 5), [0]),
    case(real(4, 0), [0]),
    when=lambda call: _rows(call.inputs[0], (*call.inputs, None)[1]) >= FEWEST_ROWS,
)
def row_of_ones(op: Builder, x: Var, axes: Var | None = None, *, keepdims: int = 1, **_: int) -> Var | None:
    """Write ReduceSum over leading axes as ``1ᵀ X``; None for other axes, or more than ``MOST_ROWS`` rows.

    It is 2 to 3 times faster for 256 columns or more, and 10 times for small sums.
    """
    rows = _rows(x, axes)
    if not 0 < rows <= MOST_ROWS or axes is None or axes.const is None:
        return None
    count, dims = axes.const.size, shapes.known_sizes(x.shape)
    row = op.const(np.ones((1, rows), np.float32)) @ op.Reshape(x, [rows, math.prod(dims[count:])], allowzero=1)
    return op.Reshape(row, [1] * count * keepdims + dims[count:], allowzero=1)


# a summand with at least this many elements is faster in a separate node (see ``separate_sum``), a smaller one in Gemm
LARGE_SUMMAND = 1 << 15


def _updates_weights(call: Call) -> bool:
    """Return whether a Gemm's summand is a large graph input with other readers, such as weights in an update.

    Running sums of a loop do not count: they are in the cache, and stay in the Gemm.
    """
    c = call.inputs[2] if len(call.inputs) > 2 else None
    if c is None or not shapes.is_static(c.shape) or math.prod(shapes.known_sizes(c.shape)) < LARGE_SUMMAND:
        return False
    return c.value.is_graph_input() and len(c.value.uses()) > 1


@form(
    "Gemm",
    case(real(3, 4), real(4, 5), real(3, 5)),
    case(real(4, 3), real(5, 4), real(3, 5), alpha=-0.5, transA=1, transB=1),
    case(real(0, 4), real(4, 5), real(0, 5)),
    when=_updates_weights,
)
def separate_sum(
    op: Builder, a: Var, b: Var, c: Var | None = None, *, alpha: float = 1.0, beta: float = 1.0, **turned: Any
) -> Var | None:
    """Write a Gemm as a product and a separate subtraction, for large summands such as the weights in an update.

    In a Gemm, onnxruntime copies the summand on one thread, and accumulates with every block of the inner axis. With
    SGD this form saves 5 % of a step of GPT, 3 % of an MLP's. It writes a difference with −α, as onnxruntime would fuse
    a sum into one Gemm again; the result is equal bit for bit. None if there is no summand of the product's shape, or
    ``beta`` is not 1.
    """
    if c is None or beta != 1.0 or a.shape is None or b.shape is None or not shapes.is_static(c.shape):
        return None
    if c.shape != (a.shape[turned.get("transA", 0)], b.shape[1 - turned.get("transB", 0)]):
        return None
    return c - op.Gemm(a, b, alpha=-alpha, **turned)


# numbers of rows, and minimum elements of a weight (512x512), for which the weight is faster as the first factor
FEW_ROWS = range(8, 97)
LARGE_WEIGHT = 1 << 18


def _few_rows_meet(x: Var | None, w: Var | None) -> bool:
    """Return whether ``x`` has few rows, and ``w`` is large and not constant, thus not prepacked by onnxruntime."""
    if x is None or w is None or not shapes.is_static(x.shape) or not shapes.is_static(w.shape):
        return False
    return (
        math.prod(shapes.known_sizes(x.shape)[:-1]) in FEW_ROWS
        and math.prod(shapes.known_sizes(w.shape)) >= LARGE_WEIGHT
        and not (w.value.is_initializer() or w.const is not None)
    )


def _weight_first(op: Builder, x: Var, w: Var) -> Var | None:
    """Compute ``x·Wᵀ`` as ``(W·xᵀ)ᵀ``: onnxruntime packs the second factor for its kernel, and x is smaller than W.

    Time relative to ``x·Wᵀ``, for weights of 512x512 to 2048x2048: 0.62 to 0.96 with 8 to 64 rows, 0.95 to 1.04 with
    128. The same form of ``x·W`` takes 0.98 to 1.5 of its time, since onnxruntime also packs a transposed first factor.
    None unless x is float32 and all sizes are known.
    """
    if x.value.dtype != ir.DataType.FLOAT or not shapes.is_static(x.shape) or not shapes.is_static(w.shape):
        return None
    (*stack, inner), outer = shapes.known_sizes(x.shape), shapes.known_sizes(w.shape)[0]
    rows = op.Reshape(x, [math.prod(stack), inner], allowzero=1)
    product = op.Transpose(matmul(op, w, rows, right=True), perm=[1, 0])
    return op.Reshape(product, [*stack, outer], allowzero=1)


@form(
    "Gemm",
    case(real(3, 4), real(5, 4)),
    case(real(3, 4), real(5, 4), real(5), alpha=-0.5, beta=2.0, transB=1),
    case(real(3, 4), real(5, 4), real(3, 1), transB=1),
    case(real(0, 4), real(5, 4), real(5), transB=1),
    when=lambda call: _few_rows_meet(*call.inputs[:2]),
)
def weight_first(
    op: Builder, x: Var, w: Var, c: Var | None = None, *, alpha: float = 1.0, beta: float = 1.0, **turned: Any
) -> Var | None:
    """Compute the Gemm ``α·x·Wᵀ + β·c`` by ``_weight_first``.

    None unless only W is transposed, x is float32, and the sizes of x and W are known.
    """
    if turned.get("transA") or not turned.get("transB"):
        return None
    product = _weight_first(op, x, w)
    if product is None:
        return None
    product = product if alpha == 1.0 else product * alpha
    return product if c is None else product + (c if beta == 1.0 else c * beta)


def _before_transpose(w: Var | None) -> Var | None:
    """Return the matrix that a Transpose turns into ``w``, or None if no Transpose computes ``w``."""
    return w.op.wrap(before_swap(w.value)) if w is not None and w.shape is not None and w.rank == 2 else None


@form(
    "MatMul",
    case(real(3, 4), real(5, 4), graph="t = Transpose<perm = [1, 0]>(x1)  y0 = MatMul(x0, t)"),
    case(real(2, 3, 4), real(5, 4), graph="t = Transpose<perm = [1, 0]>(x1)  y0 = MatMul(x0, t)"),
    case(real(2, 0, 4), real(5, 4), graph="t = Transpose<perm = [1, 0]>(x1)  y0 = MatMul(x0, t)"),
    when=lambda call: _few_rows_meet(call.inputs[0], _before_transpose(call.inputs[1])),
)
def transposed_weight_first(op: Builder, x: Var, b: Var) -> Var | None:
    """Apply ``_weight_first`` to a MatMul that reads a Transpose of the weight; None for any other MatMul."""
    w = _before_transpose(b)
    return None if w is None or x.shape is None or x.rank < 2 else _weight_first(op, x, w)


def _is_frozen_transposed(call: Call) -> bool:
    w = _before_transpose(call.inputs[1])
    return w is not None and large_in_file(w.value) is not None


@form(
    "MatMul",
    case(real(3, 4), real(5, 4), graph="t = Transpose<perm = [1, 0]>(x1)  y0 = MatMul(x0, t)"),
    case(real(2, 3, 4), real(5, 4), graph="t = Transpose<perm = [1, 0]>(x1)  y0 = MatMul(x0, t)"),
    when=_is_frozen_transposed,
)
def frozen_transposed(op: Builder, x: Var, b: Var) -> Var | None:
    """Compute ``x·Wᵀ`` by FusedMatMul, which saves memory if the weight W is frozen.

    For MatMul, onnxruntime computes the Transpose of W once and keeps the result: with LoRA, another 1.1 times the size
    of the weights, although sessions map the weights from their file. None if ``b`` is not the Transpose of a matrix,
    or x is not float32 with two or more axes.
    """
    w = _before_transpose(b)
    if w is None or x.shape is None or x.rank < 2 or x.value.dtype != ir.DataType.FLOAT:
        return None
    return matmul(op, x, w, right=True)


MANY_BIASED = 1 << 17  # an output with at least this many elements gets its bias separately: see ``separate_bias``


def _gets_bias(call: Call) -> bool:
    """Return whether the output is large, and its only reader is an Add of a vector."""
    y = call.node.outputs[0]
    reader, dims = only_reader(y, "Add"), shape_of(y)
    if reader is None or not shapes.is_static(dims):
        return False
    beside = [shape_of(x) for x in reader.inputs if x is not None and x is not y]
    vector = len(beside) == 1 and beside[0] is not None and len(beside[0]) == 1
    return vector and math.prod(shapes.known_sizes(dims)) >= MANY_BIASED


@form(
    "MatMul",
    case(real(4, 3), real(3, 5)),
    case(real(2, 4, 3), real(3, 5)),
    case(real(0, 3), real(3, 5)),
    when=_gets_bias,
)
def separate_bias(op: Builder, a: Var, b: Var) -> Var | None:
    """Compute the product of rows and a weight by FusedMatMul; onnxruntime does not fuse that with the Add of a bias.

    It would fuse a MatMul with the Add to a Gemm, in which a single thread writes the bias into every row of the output
    before the product is added. Not fusing reduces the time of a step by 2 % (GPT, 1,024 rows) and 2 to 5 % (BERT,
    2,048 rows). None unless ``a`` is float32 with two or more axes, and ``b`` is a matrix.
    """
    if a.shape is None or b.shape is None or a.rank < 2 or b.rank != 2 or a.value.dtype != ir.DataType.FLOAT:
        return None
    return matmul(op, a, b)

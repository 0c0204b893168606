"""Convert matrix products, and weights that are stored as integers.

A product with integer weights reads them as they are stored: its loop converts each element that it reads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.export.c.c_products import Cut, cuts_of
from gradgraph.export.c.c_reading import READERS, Reader, only_float
from gradgraph.export.c.operators import SUM, literal
from gradgraph.export.c.program import Map, Reduce, Tensor, View
from gradgraph.graph.nodes import input_at


def product(r: Reader, a: View, b: View) -> View:
    """Add the product of matrices of shapes [..., m, k] and [..., k, n], and return it."""
    only_float(r, a, b)
    (m, k), n = a.shape[-2:], b.shape[-1]
    batch = tuple(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    a, b = a.expanded((*batch, m, k)), b.expanded((*batch, k, n))
    if a.tensor in r.dequantized or b.tensor in r.dequantized:
        domain = (*batch, m, n, k)
        left = View(a.tensor, domain, (*a.strides[:-1], 0, a.strides[-1]), a.offset)
        right = View(b.tensor, domain, (*b.strides[:-2], 0, b.strides[-1], b.strides[-2]), b.offset)
        found = sum_of_products(r, left, right, 1)
        if found is not None:
            return found
    out = Tensor((*batch, m, n), "float32", "")
    a, b = _stored(r, a), _stored(r, b)
    if m == n == 1:  # a kernel computes tiles of a row
        terms = r.map((*batch, 1, k), "float32", "{0} * {1}", [a, b.permuted([*range(len(batch)), -1, -2])])
        r.add(Reduce(out, SUM, terms.whole(), (len(batch) + 1,)))
        return out.whole()
    left = View(a.tensor, out.shape, (*a.strides[:-1], 0), a.offset)
    right = View(b.tensor, out.shape, (*b.strides[:-2], 0, b.strides[-1]), b.offset)
    steps = a.strides[-1], b.strides[-2]
    if n > 1:
        r.rows(out, "gemm_rows", left, right, k, *steps, b.strides[-1])
    else:  # the row is a column of `a`
        r.rows(out, "gemm_rows", right, left, k, *steps[::-1], a.strides[-2])
    return out.whole()


def _stored(r: Reader, view: View) -> View:
    """Return ``view`` backed by memory: kernels do not accept literals."""
    uniform = view.tensor.role == "constant" and view.tensor.size == 1
    return r.whole(view).whole().expanded(view.shape) if uniform else view


@READERS("MatMul")
def _matmul(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    a, b = (r.view(v) for v in node.inputs)  # type: ignore[arg-type]
    if len(a.shape) == 1:
        a = r.of_shape(a, (1, *a.shape))
    if len(b.shape) == 1:
        b = r.of_shape(b, (*b.shape, 1))
    out = node.outputs[0]
    r.set(out, r.of_shape(product(r, a, b), r.shape_of(out)))


@READERS("Gemm")
def _gemm(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    a, b, *c = (None if v is None else r.view(v) for v in node.inputs)
    assert a is not None and b is not None
    a = a.permuted([1, 0]) if attrs.get("transA", 0) else a
    b = b.permuted([1, 0]) if attrs.get("transB", 0) else b
    made = product(r, a, b)
    if attrs.get("alpha", 1.0) != 1.0:
        made = r.map(made.shape, made.dtype, literal(attrs["alpha"], "float32") + " * {0}", [made]).whole()
    if c and c[0] is not None:
        beta = attrs.get("beta", 1.0)
        template = "{0} + {1}" if beta == 1.0 else "{0} + " + literal(beta, "float32") + " * {1}"
        made = r.map(made.shape, made.dtype, template, [made, c[0]]).whole()
    r.set(node.outputs[0], made)


# --- weights stored as integers ---------------------------------------------------------------------------


@READERS("DequantizeLinear")
def _dequantize(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, scale = (r.view(v) for v in node.inputs[:2])  # type: ignore[arg-type]
    point = input_at(node, 2)
    only_float(r, scale)
    shape = split = x.shape
    operands = [x, scale] if point is None or _is_zero(r, point) else [x, scale, r.view(point)]
    block, axis = int(attrs.get("block_size", 0)), int(attrs.get("axis", 1))
    if block:
        axis %= len(shape)
        if shape[axis] % block:
            raise r.unsupported("its last block is not complete")
        split = (*shape[:axis], shape[axis] // block, block, *shape[axis + 1 :])
        column = (*split[: axis + 1], 1, *split[axis + 2 :])
        operands = [r.of_shape(x, split), *(r.of_shape(v, column) for v in operands[1:])]
    elif len(scale.shape) == 1 and shape:
        axis %= len(shape)
        column = tuple(n if i == axis else 1 for i, n in enumerate(shape))
        operands = [x, *(r.of_shape(v, column if v.size > 1 else ()) for v in operands[1:])]
    template = "(float){0} * {1}" if len(operands) == 2 else "((float){0} - (float){2}) * {1}"
    if x.dtype == "int32":  # biases: the difference of large integers is exact
        template = template.replace("((float){0} - (float){2})", "(float)({0} - {2})")
    made = r.map(split, "float32", template, operands)
    if all(v.tensor.role == "constant" for v in operands):
        maker = next(o for o in r.program.operations if isinstance(o, Map) and o.out is made)
        r.dequantized[made] = maker
    r.set(node.outputs[0], r.of_shape(made.whole(), shape))


def _is_zero(r: Reader, value: ir.Value) -> bool:
    found = r.constant(value)
    return found is not None and not found.astype(np.int64).any()


def sum_of_products(r: Reader, left: View, right: View, sums: int) -> View | None:
    """Add the sums over the last ``sums`` axes of ``left`` · ``right``, and return them, without these axes.

    Integers that one factor is computed from are converted in the loop. Returns None if no factor is computed from
    integers, or if it is read in an order that their scales do not have.
    """
    for swapped, view in enumerate((left, right)):
        maker = r.dequantized.get(view.tensor)
        cuts = None if maker is None else cuts_of(view)
        if maker is None or cuts is None:
            continue
        other = _split(left if swapped else right, cuts)
        start = np.unravel_index(view.offset, view.tensor.shape) if view.tensor.shape else ()
        operands = []
        for u in maker.operands:
            strides = tuple(0 if axis is None else u.strides[axis] for cut in cuts for _, axis in cut)
            offset = u.offset + sum(int(i) * s for i, s in zip(start, u.strides, strict=True))
            operands.append(View(u.tensor, other.shape, strides, offset))
        number, terms = (Tensor(other.shape, "float32", "") for _ in range(2))
        r.add(Map(number, maker.template, operands))
        r.add(Map(terms, "{0} * {1}", [other, number.whole()] if swapped else [number.whole(), other]))
        kept = sum(map(len, cuts[: len(cuts) - sums]))
        out = Tensor(other.shape[:kept], "float32", "")
        r.add(Reduce(out, SUM, terms.whole(), tuple(range(kept, len(other.shape)))))
        return out.whole().reshaped(left.shape[: len(left.shape) - sums])
    return None


def _split(view: View, cuts: list[Cut]) -> View:
    shape, strides = [], []
    for cut, step in zip(cuts, view.strides, strict=True):
        sizes = [n for n, _ in cut]
        shape += sizes
        strides += [step * math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return View(view.tensor, tuple(shape), tuple(strides), view.offset)

"""Convert nodes with windows (convolution, pooling), indices, or sums along an axis."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.export.c.c_matmul import sum_of_products
from gradgraph.export.c.c_reading import READERS, Reader, only_float
from gradgraph.export.c.program import FAULT, FLAT, Call, Map, Shape, Tensor, View

KINDS = ("int8", "uint8", "int4", "uint4")  # as `stored` in kernels.c numbers them


def _plane(numbers: Any, missing: int, count: int) -> list[int]:
    """Return a window attribute as two values, for height and width; a 1-D window has height 1."""
    found = [missing] * count if not numbers else [int(n) for n in numbers]
    return [missing, *found] if count == 1 else found


def _images(shape: Shape) -> Shape:
    return (*shape[:2], 1, shape[2]) if len(shape) == 3 else shape


def geometry(r: Reader, attrs: dict[str, Any], x: Shape, y: Shape, kernel: Any) -> tuple[int, ...]:
    """Return the sizes, strides, dilations and pads of a window, in the order that ``kernels.c`` expects."""
    count = len(x) - 2
    if count not in (1, 2):
        raise r.unsupported(f"it has {count} spatial axes; 1 and 2 are supported")
    if attrs.get("auto_pad", "NOTSET") not in ("NOTSET", ""):
        raise r.unsupported("it has auto_pad")
    pads = [int(n) for n in attrs.get("pads") or [0] * (2 * count)]
    begin = [0, *pads[:1]] if count == 1 else pads[:2]
    if min(pads) < 0:
        raise r.unsupported("it has negative pads")
    sizes = [*_images(x)[1:], *_images(y)[1:], *_plane(kernel, 1, count)]
    spread = [*_plane(attrs.get("strides"), 1, count), *_plane(attrs.get("dilations"), 1, count)]
    return (*sizes, *spread, *begin, int(attrs.get("group", 1)))


def _biased(r: Reader, made: View, bias: View | None) -> View:
    if bias is None:
        return made
    column = r.of_shape(bias, (bias.size, *[1] * (len(made.shape) - 2)))
    return r.map(made.shape, made.dtype, "{0} + {1}", [made, column]).whole()


@READERS("Conv", "ConvTranspose")
def _conv(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, w, *b = (None if v is None else r.view(v) for v in node.inputs)
    assert x is not None and w is not None
    only_float(r, x, w)
    if attrs.get("output_shape"):
        raise r.unsupported("it has output_shape")
    shape = r.shape_of(node.outputs[0])
    if node.op_type == "Conv":
        p = geometry(r, attrs, x.shape, shape, w.shape[2:])
        made = _pointwise(r, x, w, p, (0, 1)) or _convolved(r, node, "conv_rows", x, w, p)
    else:  # ConvTranspose: the input gradient of the convolution that maps its output to its input
        p = geometry(r, attrs, shape, x.shape, w.shape[2:])
        made = _convolved(r, node, "conv_input_rows", x, w, p)
    r.set(node.outputs[0], _biased(r, made, b[0] if b else None))


def _convolved(r: Reader, node: ir.Node, kernel: str, x: View, w: View, p: tuple[int, ...]) -> View:
    """Add a convolution, or the gradient of its input, and return it."""
    made = r.tensor(node.outputs[0])
    stored = _stored(r, w)
    if stored is None:
        r.rows(made, kernel, r.whole(x), r.whole(w), FLAT, p)
    else:
        r.rows(made, f"{kernel}_stored", r.whole(x), *stored[:-1], FLAT, p, stored[-1])
    return made.whole()


def _stored(r: Reader, w: View) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]] | None:
    """Return integers, scales and zero points of weights, as kernels read them; None if they are stored as floats.

    The last item has the type of the integers and the steps from one output channel to the next in the other two.
    """
    maker = r.dequantized.get(w.tensor) if w.is_whole else None
    if maker is None or maker.out.shape != w.shape:
        return None
    integers, scale, *points = maker.operands
    plain = integers.is_whole and integers.tensor.size == w.size and integers.dtype in KINDS
    if not plain or any(v.offset or any(v.strides[1:]) for v in (scale, *points)):
        return None
    zero = Tensor((), "int32", "", "constant", np.zeros((), np.int32))
    if points:
        assert points[0].tensor.data is not None
        zero = Tensor(points[0].tensor.shape, "int32", "", "constant", points[0].tensor.data.astype(np.int32))
    steps = (scale.strides[0], points[0].strides[0] if points else 0)
    return integers.tensor, scale.tensor, zero, (KINDS.index(integers.dtype), *steps)


def _pointwise(r: Reader, x: View, w: View, p: tuple[int, ...], axes: tuple[int, int]) -> View | None:
    """Add a convolution of single elements whose weights are stored as integers, or the gradient of its input.

    ``axes`` are the axes of ``w`` for the channels of the result and for the channels of ``x``.
    """
    if w.tensor not in r.dequantized or p[1:3] != p[4:6] or p[6:10] != (1, 1, 1, 1) or p[12:] != (0, 0, 1):
        return None
    out, channels = (w.shape[axis] for axis in axes)
    domain = (x.shape[0], out, *x.shape[2:], channels)
    factors = View(w.tensor, domain, (0, w.strides[axes[0]], *[0] * len(x.shape[2:]), w.strides[axes[1]]), w.offset)
    images = View(x.tensor, domain, (x.strides[0], 0, *x.strides[2:], x.strides[1]), x.offset)
    return sum_of_products(r, images, factors, 1)


@READERS("gradgraph:ConvGradInput")
def _conv_input(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    dy, w = (r.view(v) for v in node.inputs[:2])  # type: ignore[arg-type]
    only_float(r, dy, w)
    p = geometry(r, attrs, r.shape_of(node.outputs[0]), dy.shape, w.shape[2:])
    made = _pointwise(r, dy, w, p, (1, 0)) or _convolved(r, node, "conv_input_rows", dy, w, p)
    r.set(node.outputs[0], made)


@READERS("gradgraph:ConvGradWeight")
def _conv_weight(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, dy = (r.view(v) for v in node.inputs[:2])  # type: ignore[arg-type]
    only_float(r, x, dy)
    made = r.tensor(node.outputs[0])
    p = geometry(r, attrs, x.shape, dy.shape, made.shape[2:])
    r.set(node.outputs[0], r.rows(made, "conv_weight_rows", r.whole(x), r.whole(dy), FLAT, (*p, x.shape[0])))


@READERS("MaxPool")
def _max_pool(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x = r.view(node.inputs[0])  # type: ignore[arg-type]
    only_float(r, x)
    if attrs.get("storage_order", 0):
        raise r.unsupported("it has storage_order 1")
    shape = r.shape_of(node.outputs[0]) if node.outputs[0].name else r.shape_of(node.outputs[1])
    p = geometry(r, attrs, x.shape, shape, attrs["kernel_shape"])
    y, where = r.wanted(node, 0), r.wanted(node, 1)
    r.add(Call([y, where], "max_pool", [y, where, r.whole(x), (*p, math.prod(x.shape[:2]))]))


@READERS("AveragePool", "gradgraph:AveragePoolGrad")
def _average_pool(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    read, made = r.view(node.inputs[0]), r.tensor(node.outputs[0])  # type: ignore[arg-type]
    only_float(r, read)
    if attrs.get("ceil_mode", 0) and attrs.get("count_include_pad", 0):
        raise r.unsupported("it has both ceil_mode and count_include_pad")
    kernel, x, y = "average_pool_rows", read.shape, made.shape
    if node.op_type == "AveragePoolGrad":
        kernel, x, y = "average_pool_input_rows", made.shape, read.shape
    p = (*geometry(r, attrs, x, y, attrs["kernel_shape"]), int(attrs.get("count_include_pad", 0)))
    r.set(node.outputs[0], r.rows(made, kernel, r.whole(read), FLAT, p))


@READERS("MaxUnpool")
def _max_unpool(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, where = (r.view(v) for v in node.inputs[:2])  # type: ignore[arg-type]
    only_float(r, x)
    out = r.tensor(node.outputs[0])
    indices = _indices(r, where, out.size)
    r.set(node.outputs[0], r.call(out, "max_unpool", r.whole(x), indices, x.size, out.size, FAULT))


# --- indices and sums along an axis -----------------------------------------------------------------------


def _parts(shape: Shape, axis: int) -> tuple[int, int, int]:
    """Return the products of the sizes before ``axis``, of ``axis``, and after it."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _indices(r: Reader, view: View, size: int) -> Tensor:
    """Return indices of elements of an axis of ``size``; kernels read element 0 where one is out of range."""
    if view.size and not size:
        raise r.unsupported("its indices are for an axis of size 0")
    if view.dtype == "int64":
        return r.whole(view)
    return r.map(view.shape, "int64", "(int64_t){0}", [view])


@READERS("Gather")
def _gather(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, at = (r.view(v) for v in node.inputs)  # type: ignore[arg-type]
    axis, known, out = int(attrs.get("axis", 0)) % len(x.shape), r.constant(node.inputs[1]), node.outputs[0]
    maker = r.dequantized.get(x.tensor) if x.is_whole else None
    found = None if maker is None else _dequantized_rows(r, maker, _parts(x.shape, axis), at)
    if found is None and known is not None and known.size == 1 and x.shape[axis] > 0:
        index = int(known.ravel()[0])
        if not -x.shape[axis] <= index < x.shape[axis]:
            raise r.unsupported(f"its index {index} is out of range")
        found = x.sliced(axis, index % x.shape[axis], 1)
    if found is None:
        sizes = (*_parts(x.shape, axis), at.size, np.dtype(x.dtype).itemsize)
        found = r.call(r.tensor(out), "gather", r.whole(x), _indices(r, at, x.shape[axis]), *sizes, FAULT)
    r.set(out, r.of_shape(found, r.shape_of(out)))


def _dequantized_rows(r: Reader, maker: Map, parts: tuple[int, int, int], at: View) -> View | None:
    """Add the gathered rows of a table that is stored as integers, and return them: only these are dequantized.

    Args:
        maker: the operation that dequantizes the table.
        parts: the products of the table's sizes before the axis of the indices, of this axis, and after it.

    Returns:
        None if the rows of the table are in blocks with common scales, or its integers are not stored as an array.
    """
    shape, integers = maker.out.shape, maker.operands[0]
    axis = next((i for i in range(len(shape)) if _parts(shape, i) == parts), None)
    if axis is None or not integers.is_whole or integers.dtype not in KINDS or integers.size == 0:
        return None
    indices = _indices(r, at, parts[1])
    rows = []
    for view in maker.operands:
        sizes = [n if step or view is integers else 1 for n, step in zip(view.shape, view.strides, strict=True)]
        before, after = tuple(sizes[:axis]), tuple(sizes[axis + 1 :])
        if sizes[axis] == 1 and view is not integers:  # the same for all rows
            strides = (*view.strides[:axis], *[0] * len(at.shape), *view.strides[axis + 1 :])
            whole = (*shape[:axis], *at.shape, *shape[axis + 1 :])
            rows.append(View(view.tensor, whole, strides, view.offset))
            continue
        out = Tensor((*before, *at.shape, *after), "float32", "")
        kernel, kind = ("gather_stored", KINDS.index(view.dtype)) if view.dtype in KINDS else ("gather", 4)
        source = View(view.tensor, tuple(sizes), view.strides, view.offset)
        stored = source.tensor if source.is_whole else r.whole(source)
        rows.append(r.call(out, kernel, stored, indices, *_parts(tuple(sizes), axis), at.size, kind, FAULT))
    made = r.map((*shape[:axis], *at.shape, *shape[axis + 1 :]), "float32", maker.template, rows)
    return made.whole()


@READERS("gradgraph:GatherGrad")
def _gather_sum(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    dy, at = (r.view(v) for v in node.inputs[:2])  # type: ignore[arg-type]
    only_float(r, dy)
    made = r.tensor(node.outputs[0])
    parts = _parts(made.shape, int(attrs["axis"]) % len(made.shape))
    indices = _indices(r, at, parts[1])
    r.set(node.outputs[0], r.call(made, "gather_sum", r.whole(dy), indices, *parts, at.size, FAULT))


@READERS("GatherElements", "ScatterElements")
def _elements(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, at, *updates = (r.view(v) for v in node.inputs)  # type: ignore[arg-type]
    axis = int(attrs.get("axis", 0)) % len(x.shape)
    if [n for i, n in enumerate(x.shape) if i != axis] != [n for i, n in enumerate(at.shape) if i != axis]:
        raise r.unsupported("its indices must have the shape of its data, except along its axis")
    sizes = *_parts(x.shape, axis), at.shape[axis]
    made, read = r.tensor(node.outputs[0]), (r.whole(x), _indices(r, at, x.shape[axis]))
    if not updates:
        found = r.call(made, "gather_elements", *read, *sizes, np.dtype(x.dtype).itemsize, FAULT)
    else:
        only_float(r, x, *updates)
        how = attrs.get("reduction", "none")
        if how not in ("none", "add"):
            raise r.unsupported(f"the reduction {how}")
        found = r.call(made, "scatter_elements", *read, r.whole(updates[0]), *sizes, int(how == "add"), FAULT)
    r.set(node.outputs[0], found)


@READERS("gradgraph:CrossEntropyGrad")
def _cross_entropy(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    log_p, places, d = (r.view(v) for v in node.inputs)  # type: ignore[arg-type]
    only_float(r, log_p, d)
    axis = int(attrs["axis"]) % len(log_p.shape)
    if places.shape[axis] != 1:
        raise r.unsupported("it has several places per row")
    read = r.whole(log_p), _indices(r, places, log_p.shape[axis]), r.whole(d)
    made = r.call(r.tensor(node.outputs[0]), "cross_entropy_gradient", *read, *_parts(log_p.shape, axis), FAULT)
    r.set(node.outputs[0], made)


@READERS("CumSum")
def _cumulative_sum(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, axis = r.view(node.inputs[0]), r.constant(node.inputs[1])  # type: ignore[arg-type]
    only_float(r, x)
    if axis is None:
        raise r.unsupported("its axis must be constant")
    parts = _parts(x.shape, int(axis.ravel()[0]) % len(x.shape))
    options = int(attrs.get("exclusive", 0)), int(attrs.get("reverse", 0))
    r.set(node.outputs[0], r.call(r.tensor(node.outputs[0]), "cumulative_sum", r.whole(x), *parts, *options))


@READERS("Softmax", "LogSoftmax")
def _softmax(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    """Read a Softmax of float32; of other types, it was replaced by its formula."""
    x = r.whole(r.view(node.inputs[0]))  # type: ignore[arg-type]
    parts = _parts(x.shape, int(attrs.get("axis", -1)) % len(x.shape))
    kernel = "softmax" if node.op_type == "Softmax" else "log_softmax"
    r.set(node.outputs[0], r.call(r.tensor(node.outputs[0]), kernel, x, *parts, in_place=x))

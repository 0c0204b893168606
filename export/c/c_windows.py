"""Convert nodes with windows (convolution, pooling), indices or loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.export.c.c_reading import Reader, only_float, reads, result
from gradgraph.export.c.program import FLAT, Argument, Call, Repeat, Shape, Tensor, View


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


def _biased(r: Reader, made: Tensor, bias: View | None) -> View:
    if bias is None:
        return made.whole()
    column = r.of_shape(bias, (bias.size, *[1] * (len(made.shape) - 2)))
    return r.map(made.shape, made.dtype, "{0} + {1}", [made.whole(), column]).whole()


@reads("Conv", "ConvTranspose")
def _conv(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, w, *b = (None if v is None else r.view(v) for v in node.inputs)
    assert x is not None and w is not None
    only_float(r, x, w)
    if attrs.get("output_shape"):
        raise r.unsupported("it has output_shape")
    made = r.tensor(node.outputs[0])
    if node.op_type == "Conv":
        p = geometry(r, attrs, x.shape, made.shape, w.shape[2:])
        r.rows(made, "conv_rows", r.whole(x), r.whole(w), FLAT, p)
    else:  # ConvTranspose: the input gradient of the convolution that maps its output to its input
        p = geometry(r, attrs, made.shape, x.shape, w.shape[2:])
        r.rows(made, "conv_input_rows", r.whole(x), r.whole(w), FLAT, p)
    r.set(node.outputs[0], _biased(r, made, b[0] if b else None))


@reads("gradgraph:ConvGradInput")
def _conv_input(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    dy, w = (r.view(v) for v in node.inputs[:2])  # type: ignore[arg-type]
    only_float(r, dy, w)
    made = r.tensor(node.outputs[0])
    p = geometry(r, attrs, made.shape, dy.shape, w.shape[2:])
    r.rows(made, "conv_input_rows", r.whole(dy), r.whole(w), FLAT, p)
    r.views[node.outputs[0]] = made.whole()


@reads("gradgraph:ConvGradWeight")
def _conv_weight(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, dy = (r.view(v) for v in node.inputs[:2])  # type: ignore[arg-type]
    only_float(r, x, dy)
    made = r.tensor(node.outputs[0])
    p = geometry(r, attrs, x.shape, dy.shape, made.shape[2:])
    r.rows(made, "conv_weight_rows", r.whole(x), r.whole(dy), FLAT, (*p, x.shape[0]))
    r.views[node.outputs[0]] = made.whole()


@reads("MaxPool")
def _max_pool(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x = r.view(node.inputs[0])  # type: ignore[arg-type]
    only_float(r, x)
    if attrs.get("storage_order", 0):
        raise r.unsupported("it has storage_order 1")
    shape = r.shape_of(node.outputs[0]) if node.outputs[0].name else r.shape_of(node.outputs[1])
    p = geometry(r, attrs, x.shape, shape, attrs["kernel_shape"])
    y, where = r.wanted(node, 0), r.wanted(node, 1)
    r.add(Call([y, where], "max_pool", [y, where, r.whole(x), (*p, math.prod(x.shape[:2]))]))


@reads("AveragePool")
def _average_pool(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x = r.view(node.inputs[0])  # type: ignore[arg-type]
    made = r.tensor(node.outputs[0])
    p = _average(r, attrs, x, x.shape, made.shape)
    r.rows(made, "average_pool_rows", r.whole(x), FLAT, p)
    r.views[node.outputs[0]] = made.whole()


@reads("gradgraph:AveragePoolGrad")
def _average_pool_input(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    dy = r.view(node.inputs[0])  # type: ignore[arg-type]
    made = r.tensor(node.outputs[0])
    p = _average(r, attrs, dy, made.shape, dy.shape)
    r.rows(made, "average_pool_input_rows", r.whole(dy), FLAT, p)
    r.views[node.outputs[0]] = made.whole()


def _average(r: Reader, attrs: dict[str, Any], read: View, x: Shape, y: Shape) -> tuple[int, ...]:
    only_float(r, read)
    if attrs.get("ceil_mode", 0) and attrs.get("count_include_pad", 0):
        raise r.unsupported("it has both ceil_mode and count_include_pad")
    return (*geometry(r, attrs, x, y, attrs["kernel_shape"]), int(attrs.get("count_include_pad", 0)))


@reads("MaxUnpool")
def _max_unpool(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, where = (r.view(v) for v in node.inputs[:2])  # type: ignore[arg-type]
    only_float(r, x)
    out = r.tensor(node.outputs[0])
    r.add(Call([out], "max_unpool", [out, r.whole(x), r.whole(where), x.size, out.size, "fault"], checks=True))
    r.views[node.outputs[0]] = out.whole()


# --- indices ----------------------------------------------------------------------------------------------


def _parts(shape: Shape, axis: int) -> tuple[int, int, int]:
    """Return the products of the sizes before ``axis``, of ``axis``, and after it."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _indices(r: Reader, view: View) -> Tensor:
    if view.dtype == "int64":
        return r.whole(view)
    return r.map(view.shape, "int64", "(int64_t){0}", [view])


@reads("Gather")
def _gather(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, at = (r.view(v) for v in node.inputs)  # type: ignore[arg-type]
    axis, known = int(attrs.get("axis", 0)) % len(x.shape), r.constant(node.inputs[1])
    out = node.outputs[0]
    if known is not None and known.size == 1 and x.shape[axis] > 0:
        index = int(known.ravel()[0])
        if not -x.shape[axis] <= index < x.shape[axis]:
            raise r.unsupported(f"its index {index} is out of range")
        r.set(out, r.of_shape(x.sliced(axis, index % x.shape[axis], 1), r.shape_of(out)))
        return
    made = r.tensor(out)
    width = int(np.dtype(x.dtype).itemsize)
    arguments: list[Argument | None] = [
        made,
        r.whole(x),
        _indices(r, at),
        *_parts(x.shape, axis),
        at.size,
        width,
        "fault",
    ]
    r.add(Call([made], "gather", arguments, checks=True))
    r.views[out] = made.whole()


@reads("gradgraph:GatherGrad")
def _gather_sum(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    dy, at = (r.view(v) for v in node.inputs[:2])  # type: ignore[arg-type]
    only_float(r, dy)
    made = r.tensor(node.outputs[0])
    axis = int(attrs["axis"]) % len(made.shape)
    arguments: list[Argument | None] = [made, r.whole(dy), _indices(r, at), *_parts(made.shape, axis), at.size, "fault"]
    r.add(Call([made], "gather_sum", arguments, checks=True))
    r.views[node.outputs[0]] = made.whole()


@reads("GatherElements")
def _gather_elements(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, at = (r.view(v) for v in node.inputs)  # type: ignore[arg-type]
    axis = int(attrs.get("axis", 0)) % len(x.shape)
    parts = _same_elsewhere(r, x.shape, at.shape, axis)
    made = r.tensor(node.outputs[0])
    width = int(np.dtype(x.dtype).itemsize)
    arguments: list[Argument | None] = [made, r.whole(x), _indices(r, at), *parts, at.shape[axis], width, "fault"]
    r.add(Call([made], "gather_elements", arguments, checks=True))
    r.views[node.outputs[0]] = made.whole()


def _same_elsewhere(r: Reader, x: Shape, at: Shape, axis: int) -> tuple[int, int, int]:
    if _parts(x, axis)[::2] != _parts(at, axis)[::2] or [*x[:axis], *x[axis + 1 :]] != [*at[:axis], *at[axis + 1 :]]:
        raise r.unsupported("its indices must have the shape of its data, except along its axis")
    return _parts(x, axis)


@reads("ScatterElements")
def _scatter_elements(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, at, updates = (r.view(v) for v in node.inputs)  # type: ignore[arg-type]
    only_float(r, x, updates)
    axis = int(attrs.get("axis", 0)) % len(x.shape)
    parts = _same_elsewhere(r, x.shape, at.shape, axis)
    how = attrs.get("reduction", "none")
    if how not in ("none", "add"):
        raise r.unsupported(f"the reduction {how}")
    made = r.tensor(node.outputs[0])
    arguments: list[Argument | None] = [
        made,
        r.whole(x),
        _indices(r, at),
        r.whole(updates),
        *parts,
        at.shape[axis],
        int(how == "add"),
        "fault",
    ]
    r.add(Call([made], "scatter_elements", arguments, checks=True))
    r.views[node.outputs[0]] = made.whole()


@reads("gradgraph:CrossEntropyGrad")
def _cross_entropy(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    log_p, places, d = (r.view(v) for v in node.inputs)  # type: ignore[arg-type]
    only_float(r, log_p, d)
    axis = int(attrs["axis"]) % len(log_p.shape)
    if places.shape[axis] != 1:
        raise r.unsupported("it has several places per row")
    made = r.tensor(node.outputs[0])
    arguments: list[Argument | None] = [
        made,
        r.whole(log_p),
        _indices(r, places),
        r.whole(d),
        *_parts(log_p.shape, axis),
        "fault",
    ]
    r.add(Call([made], "cross_entropy_gradient", arguments, checks=True))
    r.views[node.outputs[0]] = made.whole()


@reads("CumSum")
def _cumulative_sum(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, axis = r.view(node.inputs[0]), r.constant(node.inputs[1])  # type: ignore[arg-type]
    only_float(r, x)
    if axis is None:
        raise r.unsupported("its axis must be constant")
    made = r.tensor(node.outputs[0])
    parts = _parts(x.shape, int(axis.ravel()[0]) % len(x.shape))
    options = int(attrs.get("exclusive", 0)), int(attrs.get("reverse", 0))
    r.add(Call([made], "cumulative_sum", [made, r.whole(x), *parts, *options]))
    r.views[node.outputs[0]] = made.whole()


# --- loops ------------------------------------------------------------------------------------------------


@reads("Scan")
def _scan(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    body: ir.Graph = attrs["body"]
    count = int(attrs["num_scan_inputs"])
    states = len(node.inputs) - count
    for name in ("scan_input_axes", "scan_output_axes"):
        if any(attrs.get(name) or []):
            raise r.unsupported(f"{name} must be 0")
    first = [r.whole(r.view(v)) for v in node.inputs[:states]]  # type: ignore[arg-type]
    scanned = [r.whole(r.view(v)) for v in node.inputs[states:]]  # type: ignore[arg-type]
    backwards = [bool(d) for d in attrs.get("scan_input_directions") or [0] * count]
    inside = Reader(r.views)
    own = [inside.tensor(v, "local") for v in body.inputs]
    for value, tensor in zip(body.inputs, own, strict=True):
        inside.views[value] = tensor.whole()
    outside = {v.tensor for v in r.views.values()}
    inside.read(body)
    taken: set[Tensor] = set()
    results = [result(inside, inside.view(v), taken) for v in body.outputs]
    made = [r.tensor(v) for v in node.outputs]
    for value, tensor in zip(node.outputs, made, strict=True):
        r.views[value] = tensor.whole()
    out_backwards = [bool(d) for d in attrs.get("scan_output_directions") or [0] * len(made[states:])]
    read = dict.fromkeys(v.tensor for o in inside.program.operations for v in o.views if v.tensor in outside)
    inside.program.outputs = {f"{i}": t for i, t in enumerate(results)}
    r.add(
        Repeat(
            scanned[0].shape[0],
            inside.program,
            list(zip(first, own[:states], results[:states], strict=True)),
            list(zip(scanned, own[states:], backwards, strict=True)),
            list(zip(made[states:], results[states:], out_backwards, strict=True)),
            made[:states],
            list(read),
        )
    )

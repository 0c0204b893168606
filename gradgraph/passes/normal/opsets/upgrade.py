"""Convert operators of opsets 1 to 20 to opset 21.

``@before(13, "Softmax")`` registers the converter for nodes of opsets before 13. A converter is called with the
builder, the old node, its inputs, and its attributes by keyword, and returns the new outputs, or ``None`` to keep the
node. Of several converters, the one with the lowest version above the node's opset is used; its result is valid at
opset 21. Operators without a converter mean the same at every opset up to 21.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError, shown
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import describe
from gradgraph.graph.shapes import OPSET
from gradgraph.passes.normal.edit import is_wanted

FULLY_INFERRED = 7  # the oldest opset at which ONNX infers the shapes of all operators
END = 2**31 - 1  # of a Slice: the end of the axis
ALWAYS = 10**6  # version of converters for operators that opset 21 does not have

F = TypeVar("F", bound="Form")
Form = Callable[..., "Var | tuple[Var | None, ...] | None"]

_FORMS: dict[str, list[tuple[int, Form]]] = {}


def before(opset: int, *op_types: str) -> Callable[[F], F]:
    def register(form: F) -> F:
        for op_type in op_types:
            _FORMS.setdefault(op_type, []).append((opset, form))
            _FORMS[op_type].sort(key=lambda entry: entry[0])
        return form

    return register


def form_for(op_type: str, opset: int) -> Form | None:
    """Return the converter of an operator of ``opset``; None if its nodes are valid at opset 21."""
    return next((form for limit, form in _FORMS.get(op_type, ()) if opset < limit), None)


# --- attributes that became inputs --------------------------------------------------------------------


@before(13, "ReduceSum")
@before(18, "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin")
@before(18, "ReduceProd", "ReduceSumSquare")
def reduction(op: Builder, node: ir.Node, x: Var, *, axes: list[int] | None = None, keepdims: int = 1) -> Any:
    return op.emit(node.op_type, x, axes or None, keepdims=keepdims)


@before(13, "Squeeze", "Unsqueeze")
def squeeze(op: Builder, node: ir.Node, x: Var, *, axes: list[int] | None = None) -> Any:
    return op.emit(node.op_type, x, axes)


@before(13, "Split")
def split(op: Builder, node: ir.Node, x: Var, *, axis: int = 0, split: list[int] | None = None) -> Any:
    return split_evenly(op, node, x, split, axis=axis)


@before(18, "Split")
def split_evenly(op: Builder, node: ir.Node, x: Var, lengths: Any = None, *, axis: int = 0) -> Any:
    count = len(node.outputs)
    return op.Split(x, lengths, axis=axis, num_outputs=count if lengths is None else None, outputs=count)


@before(10, "Slice")
def slice_(
    op: Builder, node: ir.Node, x: Var, *, starts: list[int], ends: list[int], axes: list[int] | None = None
) -> Any:
    return op.Slice(x, starts, ends, axes)


@before(10, "TopK")
def top_k(op: Builder, node: ir.Node, x: Var, *, k: int, axis: int = -1) -> Any:
    return op.TopK(x, [k], axis=axis, outputs=2)


@before(11, "Clip")
def clip(op: Builder, node: ir.Node, x: Var, *, min: float | None = None, max: float | None = None) -> Any:
    return op.Clip(x, min, max)


@before(11, "Pad")
def pad(op: Builder, node: ir.Node, x: Var, *, pads: list[int], mode: str = "constant", value: float = 0.0) -> Any:
    return op.Pad(x, pads, value if mode == "constant" else None, mode=mode)


@before(20, "DFT")
def dft(op: Builder, node: ir.Node, x: Var, length: Var | None = None, *, axis: int = 1, **attrs: Any) -> Any:
    return op.DFT(x, length, op.const(axis), **attrs)


# --- other defaults and names ---------------------------------------------------------------------------


@before(13, "Softmax", "LogSoftmax", "Hardmax")
def softmax(op: Builder, node: ir.Node, x: Var, *, axis: int = 1) -> Any:
    """Flatten x to a matrix at ``axis``, as the operator did up to opset 12, instead of working along one axis."""
    rank = None if x.shape is None else len(x.shape)
    if rank is not None and axis % rank == rank - 1:
        return op.emit(node.op_type, x, axis=-1)
    return op.Reshape(op.emit(node.op_type, op.Flatten(x, axis=axis), axis=-1), op.shape(x))


@before(16, "RoiAlign")
def roi_align(op: Builder, node: ir.Node, *inputs: Var, **attrs: Any) -> Any:
    return op.RoiAlign(*inputs, **attrs, coordinate_transformation_mode="output_half_pixel")


@before(20, "GridSample")
def grid_sample(op: Builder, node: ir.Node, x: Var, grid: Var, *, mode: str = "bilinear", **attrs: Any) -> Any:
    return op.GridSample(x, grid, mode={"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode), **attrs)


@before(ALWAYS, "Scatter")
def scatter(op: Builder, node: ir.Node, x: Var, indices: Var, updates: Var, *, axis: int = 0) -> Any:
    return op.ScatterElements(x, indices, updates, axis=axis)


# --- opsets 1 to 6 ----------------------------------------------------------------------------------------


@before(7, "Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor")
def aligned(op: Builder, node: ir.Node, a: Var, b: Var, *, axis: int = -1, broadcast: int = 0) -> Any:
    """Align the first axis of b with ``axis`` of a; by default, align the last axes, as NumPy does."""
    for name in ("axis", "broadcast"):
        node.attributes.pop(name, None)
    if not broadcast or axis == -1 or (b.shape is not None and all(d == 1 for d in b.shape)):
        return None
    if a.shape is None or b.shape is None:
        raise ModelError(
            f"{describe(node)} aligns its second input with axis {axis} of the first, but the rank of one of them is "
            "unknown; declare the shapes of the model's inputs"
        )
    behind = a.rank - axis - b.rank
    if axis < 0 or behind < 0:
        raise ModelError(
            f"{describe(node)} aligns an input of rank {b.rank} with axis {axis} of one of rank {a.rank}, "
            "which does not fit; export the model again"
        )
    return op.emit(node.op_type, a, _with_axes_behind(op, b, behind)) if behind else None


def _with_axes_behind(op: Builder, x: Var, count: int) -> Var:
    return op.Unsqueeze(x, list(range(x.rank, x.rank + count)))


@before(7, "PRelu")
def prelu(op: Builder, node: ir.Node, x: Var, slope: Var) -> Any:
    """Align a vector of slopes with the channels, axis 1."""
    if slope.shape is None or len(slope.shape) != 1 or slope.dim(0) == 1:
        return None
    if x.shape is None:
        raise ModelError(
            f"{describe(node)} has one slope per channel, but the rank of its input is unknown; declare the shapes of "
            "the model's inputs"
        )
    return op.PRelu(x, _with_axes_behind(op, slope, x.rank - 2)) if x.rank > 2 else None


@before(7, "Gemm", "GRU", "LSTM", "RNN")
def without_switch(op: Builder, node: ir.Node, *inputs: Var | None, **attrs: Any) -> None:
    """Drop attributes for behaviour that is now always enabled: broadcasting of C, output of all time steps."""
    for name in ("broadcast", "output_sequence"):
        node.attributes.pop(name, None)


@before(7, "Upsample")
def upsample_image(
    op: Builder, node: ir.Node, x: Var, *, height_scale: float, width_scale: float, mode: str = "nearest"
) -> Any:
    return upsample_attribute(op, node, x, scales=[1.0, 1.0, height_scale, width_scale], mode=mode)


@before(6, "Cast")
def cast_by_name(op: Builder, node: ir.Node, x: Var, *, to: str) -> Any:
    if to.upper() not in ir.DataType.__members__:
        raise ModelError(f"{describe(node)} casts to '{shown(to)}', which is not an element type; export it again")
    return op.Cast(x, to=int(ir.DataType[to.upper()]))


@before(6, "Selu")
def selu(op: Builder, node: ir.Node, x: Var, **attrs: Any) -> None:
    """Set absent attributes to the defaults of old opsets, which have fewer digits."""
    for name, default in (("alpha", 1.6732), ("gamma", 1.0507)):
        node.attributes.setdefault(name, ir.AttrFloat32(name, default))


@before(6, "Tile")
def tile(op: Builder, node: ir.Node, x: Var, tiles: Var, axis: Var) -> Any:
    """Repeat x along one axis; ``tiles`` and ``axis`` were floats in old opsets."""
    count, along = (_whole(op, v) for v in (tiles, axis))
    places = op.const(np.arange(x.rank))
    return op.Tile(x, op.Where(op.Equal(places, op.Mod(along, [x.rank])), count, 1))


def _whole(op: Builder, x: Var) -> Var:
    """Convert a number or a vector to an int64 vector."""
    known = x.const
    if known is not None:
        return op.const(known.astype(np.int64).reshape(-1))
    return op.Reshape(op.Cast(x, to=int(ir.DataType.INT64)), [-1])


@before(5, "Reshape")
def reshape(op: Builder, node: ir.Node, x: Var, *, shape: list[int]) -> Any:
    return op.Reshape(x, shape)


@before(4, "Concat")
def concat(op: Builder, node: ir.Node, *inputs: Var, axis: int = 1) -> Any:
    return op.Concat(*inputs, axis=axis)


@before(2, "Split")
def split_by_input(
    op: Builder, node: ir.Node, x: Var, lengths: Var | None = None, *, axis: int, split: list[int] | None = None
) -> Any:
    """Split by ``lengths``, which old opsets stored as floats; ``axis`` had no default."""
    return split_evenly(op, node, x, split if lengths is None else _whole(op, lengths), axis=axis)


@before(2, "Pad")
def pad_by_paddings(op: Builder, node: ir.Node, x: Var, *, paddings: list[int], **attrs: Any) -> Any:
    return pad(op, node, x, pads=paddings, **attrs)


@before(2, "GlobalLpPool", "LpPool")
def lp_pool(op: Builder, node: ir.Node, x: Var, *, p: float = 2.0, **attrs: Any) -> Any:
    """Convert ``p`` to an integer; reject fractions."""
    if not float(p).is_integer():
        raise ModelError(f"{describe(node)} has p={p}, but p must be a whole number; export it with a different p")
    return op.emit(node.op_type, x, p=int(p), **attrs)


# --- experimental operators, which ONNX removed -----------------------------------------------------------


@before(ALWAYS, "Affine")
def affine(op: Builder, node: ir.Node, x: Var, *, alpha: float = 1.0, beta: float = 0.0) -> Any:
    return alpha * x + beta


@before(ALWAYS, "ConstantFill")
def constant_fill(
    op: Builder,
    node: ir.Node,
    x: Var | None = None,
    *,
    shape: Sequence[int] = (),
    extra_shape: Sequence[int] = (),
    input_as_shape: int = 0,
    dtype: int = 1,
    value: float = 0.0,
) -> Any:
    """Fill ``shape``, the shape of x or, with ``input_as_shape``, the sizes in x; ``extra_shape`` is appended."""
    sizes = op.const(np.array(shape, np.int64)) if x is None else x if input_as_shape else op.shape(x)
    number = np.array([value], ir.DataType(dtype).numpy())
    return op.ConstantOfShape(op.Concat(sizes, np.array(extra_shape, np.int64), axis=0), value=ir.tensor(number))


@before(ALWAYS, "Scale")
def scale(op: Builder, node: ir.Node, x: Var, *, scale: float = 1.0) -> Any:
    return scale * x


@before(ALWAYS, "ImageScaler")
def image_scaler(op: Builder, node: ir.Node, x: Var, *, bias: list[float], scale: float = 1.0) -> Any:
    """Multiply [N, C, H, W] by ``scale``, and add one number of ``bias`` to each channel."""
    return scale * x + np.reshape(bias, (-1, 1, 1))


@before(ALWAYS, "ParametricSoftplus")
def parametric_softplus(op: Builder, node: ir.Node, x: Var, *, alpha: float, beta: float) -> Any:
    return alpha * op.Softplus(beta * x)


@before(ALWAYS, "ScaledTanh")
def scaled_tanh(op: Builder, node: ir.Node, x: Var, *, alpha: float, beta: float) -> Any:
    return alpha * op.Tanh(beta * x)


@before(ALWAYS, "Crop")
def crop(op: Builder, node: ir.Node, x: Var, *, border: list[int], scale: list[int] | None = None) -> Any:
    """Crop [N, C, H, W] by a left, top, right and bottom border.

    If ``scale`` is set, keep this number of rows and columns after the left and top border instead.
    """
    if len(border) != 4 or len(scale or (0, 0)) != 2:
        raise ModelError(f"{describe(node)} must have four borders, and two sizes or none; export the model again")
    left, top, right, bottom = border
    ends = [top + scale[0], left + scale[1]] if scale else [-bottom or END, -right or END]
    return op.Slice(x, [top, left], ends, [2, 3])


# --- training and statistics ----------------------------------------------------------------------------


@before(10, "Dropout")
def dropout_float_mask(op: Builder, node: ir.Node, x: Var, *, ratio: float = 0.5, is_test: int = 0) -> Any:
    """Cast the mask to the type of x, the type of masks before opset 10; ``is_test`` is ignored, as in opset 7."""
    if len(node.outputs) == 1:
        return dropout(op, node, x, ratio=ratio)
    y, mask = dropout(op, node, x, ratio=ratio)
    return y, op.cast(mask, x.dtype)


@before(12, "Dropout")
def dropout(op: Builder, node: ir.Node, x: Var, *, ratio: float = 0.5) -> Any:
    return op.Dropout(x, op.const(ratio), outputs=len(node.outputs))


@before(14, "BatchNormalization")
def batch_normalization(
    op: Builder,
    node: ir.Node,
    *inputs: Var,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
    is_test: int = 0,
) -> Any:
    """Set ``training_mode`` if there are several outputs and ``is_test`` is 0, which implied it in old opsets.

    Raises:
        ModelError: ``spatial`` is 0 for more than two axes, or a saved statistic is read.
    """
    if not spatial and (inputs[0].shape is None or inputs[0].rank != 2):
        raise ModelError(
            f"{describe(node)} has spatial=0 and more than two axes, or an unknown number, which no opset after 8 can "
            "express; export it with spatial=1"
        )
    if any(is_wanted(v) for v in node.outputs[3:]):
        raise ModelError(
            f"a saved mean or variance of {describe(node)} is used, which no opset after 13 has; export it again"
        )
    if is_test and any(is_wanted(v) for v in node.outputs[1:]):
        raise ModelError(
            f"{describe(node)} has is_test=1 and a used output that only training computes; export it again"
        )
    training = int(not is_test and any(v.name for v in node.outputs[1:]))
    outputs = 3 if training else 1
    return op.BatchNormalization(*inputs, epsilon=epsilon, momentum=momentum, training_mode=training, outputs=outputs)


@before(21, "GroupNormalization")
def group_normalization(
    op: Builder, node: ir.Node, x: Var, scale: Var, bias: Var, *, num_groups: int, epsilon: float = 1e-5
) -> Any:
    """Expand scale and bias from one number per group to one per channel."""
    repeats = op.Concat([1], op.Div(op.dim(x, 1), [num_groups]), axis=0)

    def per_channel(v: Var) -> Any:
        return op.Reshape(op.Expand(op.Unsqueeze(v, [1]), repeats), [-1])

    return op.GroupNormalization(x, per_channel(scale), per_channel(bias), num_groups=num_groups, epsilon=epsilon)


# --- resizing -------------------------------------------------------------------------------------------


@before(9, "Upsample")
def upsample_attribute(op: Builder, node: ir.Node, x: Var, *, scales: list[float], mode: str = "nearest") -> Any:
    return resize_10(op, node, x, op.const(np.array(scales, np.float32)), mode=mode)


@before(ALWAYS, "Upsample")
@before(11, "Resize")
def resize_10(op: Builder, node: ir.Node, x: Var, scales: Var, *, mode: str = "nearest") -> Any:
    """Resize with pixel coordinates ``i / scale``; nearest rounds down when enlarging and up when shrinking."""

    def resized(x: Var, scales: Any, nearest: str) -> Any:
        rounding = nearest if mode == "nearest" else None
        mode_now = "linear" if mode == "bilinear" else mode
        at = "asymmetric"
        return op.Resize(x, None, scales, mode=mode_now, coordinate_transformation_mode=at, nearest_mode=rounding)

    known = scales.const
    if mode != "nearest" or known is None or (known >= 1).all():
        return resized(x, scales, "floor")
    if (known <= 1).all():
        return resized(x, scales, "ceil")
    return resized(resized(x, np.minimum(known, 1), "ceil"), np.maximum(known, 1), "floor")


@before(13, "Resize")
def resize_11(
    op: Builder,
    node: ir.Node,
    x: Var,
    roi: Var | None = None,
    scales: Var | None = None,
    sizes: Var | None = None,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    **attrs: Any,
) -> Any:
    """Replace ``tf_half_pixel_for_nn``: its (i + 0.5) / scale, rounded down, equals half_pixel rounded half up."""
    if coordinate_transformation_mode != "tf_half_pixel_for_nn":
        return None
    if attrs.get("mode", "nearest") != "nearest" or nearest_mode != "floor":
        raise ModelError(
            f"{describe(node)} uses tf_half_pixel_for_nn without mode=nearest and nearest_mode=floor, which opset "
            f"{OPSET} cannot express; export it with a different coordinate_transformation_mode"
        )
    return op.Resize(
        x,
        None,
        scales,
        sizes,
        coordinate_transformation_mode="half_pixel",
        nearest_mode="round_prefer_ceil",
        **attrs,
    )


@before(9, "Scan")
def scan_8(op: Builder, node: ir.Node, *inputs: Var | None, **attrs: Any) -> None:
    raise ModelError(f"{describe(node)} has the batched form of opset 8; export the model with opset 9 or later")

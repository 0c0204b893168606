"""Image preprocessing in the model: resizing, cropping and normalisation of uint8 images as ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.data.augment.placing import GREY
from gradgraph.data.images.image_form import REVERSED, ImageForm
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.record.image_preprocessing import learn_preprocessing
from gradgraph.data.record.specs import TensorSpec, dtype_name
from gradgraph.errors import ModelError, shown
from gradgraph.files.models import Source, to_proto
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.prune import prune
from gradgraph.graph.shapes import as_dims
from gradgraph.passes.normal import load_runnable
from gradgraph.passes.normal.edit import names_of

LEAST_OPSET = 13
FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
BYTE = 255.0


def with_image_input(model: Source) -> onnx.ModelProto:
    """Return a copy of an inference model whose image input is uint8 [samples, height, width, channels].

    Height and width are symbolic. The preprocessing of ``gradgraph.image_folder`` in training, as recorded in the
    model's metadata (or a file next to it), is prepended in standard ONNX nodes: resizing as in Pillow, cropping or
    letterboxing, order of channels, scale, mean and std. Resized pixels differ from those of Pillow by at most one or
    two levels of 255, due to rounding of ties.

    Raises:
        ModelError: if the model has no input of images, or an opset below 13; if images are resized that have four
            channels, or with a filter other than bilinear and bicubic.
    """
    return to_proto(taking_images(model))


def taking_images(model: Source) -> ir.Model:
    """Return the model that ``with_image_input`` returns, as onnx-ir, without reading its external weights."""
    work = load_runnable(model)
    learn_preprocessing(work, model)
    names = DataNames.read_from(work.metadata_props)
    inputs = [v for v in work.graph.inputs if v.shape is not None and len(v.shape) == 4 and not v.is_initializer()]
    known = [v for v in inputs if v.name in names.images] or inputs
    if len(known) != 1 or known[0].dtype is None:
        raise ModelError(
            "the model has no input that is known to contain images: a single input of 4 axes, or one with image "
            "preprocessing in the metadata"
        )
    if work.opset_imports.get("", LEAST_OPSET) < LEAST_OPSET:
        raise ModelError(f"the model has an opset below {LEAST_OPSET}; convert it to a newer opset first")
    _put_in_front(work, known[0], names)
    return work


def _put_in_front(work: ir.Model, value: ir.Value, names: DataNames) -> None:
    graph, name = work.graph, value.name or ""
    assert value.shape is not None and value.dtype is not None
    spec = TensorSpec(name, dtype_name(int(value.dtype)), as_dims(value.shape))
    form = ImageForm(**names.images.get(name, {})).of(spec)
    op = Builder(names_of(work), scope=f"{name}.bytes")
    raw = ir.Value(name=name, type=ir.TensorType(ir.DataType.UINT8),
                   shape=ir.Shape([value.shape[0], f"{name}_height", f"{name}_width", form.channels]))  # fmt: skip
    value.name = op.fresh(f"{name}.array")
    made = _normalised(op, _resized(op, op.wrap(raw), form), form, value.dtype)
    value.replace_all_uses_with(made.value)
    graph.inputs[list(graph.inputs).index(value)] = raw
    op.finish(graph, graph[0])
    prune(work)  # removes constants that were folded into others
    images = {**names.images, name: {"layout": "NHWC"}}
    data = DataNames(names.columns, names.classes, images, names.softmax, sigmoid=names.sigmoid)
    work.metadata_props.update(data.as_metadata())


def _resized(op: Builder, raw: Var, form: ImageForm) -> Var:
    """Return the images as float32 [samples, channels, height, width], resized and cropped to the size of ``form``."""
    x = op.Transpose(op.Cast(raw, to=FLOAT), perm=[0, 3, 1, 2])
    if form.size is None:
        return x
    kind = _FILTERS.get(form.resample or "bilinear")
    if kind is None or form.channels == 4:
        what = (
            f"with the filter {shown(form.resample)}"
            if kind is None
            else "with four channels, whose colours Pillow premultiplies"
        )
        raise ModelError(
            f"images {what} cannot be resized in the model; resize them outside, and export without image input"
        )
    sides = [op.Gather(op.Shape(raw), i, axis=0) for i in (1, 2)]
    new = [op.const(side) for side in form.size]
    if form.shorter is not None:
        new = [side * form.shorter / op.Min(*sides) for side in sides]  # integers, rounded down
    elif form.letterbox:
        new = _letterboxed(op, sides, form.size)
    across = op.Transpose(_weights(op, sides[1], new[1], kind), perm=[1, 0])
    down = _weights(op, sides[0], new[0], kind)
    if kind is _bilinear:
        x = _product(op, down, _product(op, x, across))
    else:
        x = _in_order_of_pillow(op, x, across, down, sides, new)
    if form.shorter is not None:
        return _middle(op, x, new, form)
    return _padded(op, x, new, form.size, GREY) if form.letterbox else x


def _letterboxed(op: Builder, sides: Sequence[Var], size: tuple[int, int]) -> list[Var]:
    """Return height and width of an image after scaling it to fit into ``size``; computed in float64, as in Python."""
    wide = [op.Cast(side, to=ir.DataType.DOUBLE) for side in sides]
    scale = op.Min(*(op.const(np.float64(most)) / side for side, most in zip(wide, size, strict=True)))
    rounded = [op.Cast(op.Round(side * scale), to=INT64) for side in wide]
    return [op.Max(op.Min(side, op.const(most)), op.const(1)) for side, most in zip(rounded, size, strict=True)]


def _middle(op: Builder, x: Var, sides: Sequence[Var], form: ImageForm) -> Var:
    """Return the centre of the images, of size ``form.size``, padded with black if smaller; see ``form.crop``."""
    assert form.size is not None and form.shorter is not None
    if form.shorter < max(form.size):
        x, sides = _padded(op, x, sides, form.size, 0.0), [op.Max(s, w) for s, w in zip(sides, form.size, strict=True)]
    for axis, side, wanted in zip((2, 3), sides, form.size, strict=True):
        half = (op.Cast(side, to=FLOAT) - float(wanted)) * 0.5
        first = op.Cast(half if form.crop == "floor" else op.Round(half), to=INT64)  # half to even, as in Python
        first = op.Reshape(first, [1])
        x = op.Slice(x, first, first + wanted, [axis])
    return x


def _padded(op: Builder, x: Var, sides: Sequence[Var], size: tuple[int, int], level: float) -> Var:
    """Return the images padded to ``size`` with ``level``; an odd pixel goes to the bottom or right margin."""
    missing = [op.Reshape(op.Max(wanted - side, op.const(0)), [1]) for side, wanted in zip(sides, size, strict=True)]
    front = [rest / 2 for rest in missing]
    none = op.const(np.zeros(2, np.int64))
    pads = op.Concat(none, *front, none, *(rest - some for rest, some in zip(missing, front, strict=True)), axis=0)
    return op.Pad(x, pads, float(level))


def _weights(op: Builder, before: Var, after: Var, kind: Callable[[Builder, Var], Var]) -> Var:
    """Return the resampling weights along one axis: [after, before], the weight of each old pixel in each new pixel.

    As in Pillow's ``precompute_coeffs``, the filter ``kind`` is stretched by the factor by which an image shrinks.
    """
    zero, step = op.const(0), op.const(1)
    scale = op.Cast(before, to=FLOAT) / op.Cast(after, to=FLOAT)
    middles = (op.Cast(op.Range(zero, after, step), to=FLOAT) + 0.5) * scale
    places = op.Cast(op.Range(zero, before, step), to=FLOAT) + 0.5
    far = op.Abs(op.Unsqueeze(middles, [1]) - op.Unsqueeze(places, [0])) / op.Max(scale, 1.0)
    shares = kind(op, far)
    return shares / op.ReduceSum(shares, [1], keepdims=1)


def _bilinear(op: Builder, far: Var) -> Var:
    return op.Max(1.0 - far, 0.0)


def _bicubic(op: Builder, far: Var) -> Var:
    """Return Keys' cubic kernel with a = −1/2 at distance ``far``."""
    near = (1.5 * far - 2.5) * far * far + 1.0
    beyond = ((far - 5.0) * far + 8.0) * far * -0.5 + 2.0
    return op.Where(far < 1.0, near, op.Where(far < 2.0, beyond, 0.0))


_FILTERS: dict[str, Callable[[Builder, Var], Var]] = {"bilinear": _bilinear, "bicubic": _bicubic}


def _in_order_of_pillow(
    op: Builder, x: Var, across: Var, down: Var, before: Sequence[Var], after: Sequence[Var]
) -> Var:
    """Return the images resized in Pillow's order: first along the width, then along the height.

    If the height shrinks by more than twice as many pixels as the width, the height comes first. Pillow clips the
    overshoots of bicubic weights after the first direction, so the order affects the result.
    """
    height, width = (op.cast(old, INT64) - new for old, new in zip(before, after, strict=True))
    is_tall = op.And(op.Greater(height, 0), op.Greater(height, width * 2))
    then = op.graph([], lambda: [_product(op, _product(op, down, x), across)], "columns_first")
    otherwise = op.graph([], lambda: [_product(op, down, _product(op, x, across))], "rows_first")
    resized = op.If(is_tall, then_branch=then, else_branch=otherwise)
    resized.value.type = x.value.type
    return resized


def _product(op: Builder, a: Var, b: Var) -> Var:
    """Return ``a · b``, rounded to whole numbers and clipped to [0, 255], as Pillow does after each direction."""
    return op.Clip(op.Floor(op.MatMul(a, b) + 0.5), 0.0, BYTE)


def _normalised(op: Builder, x: Var, form: ImageForm, dtype: ir.DataType) -> Var:
    """Return the images with the channel order, scale, mean, std, layout and type that the model expects."""
    if form.order == "BGR":
        x = op.Gather(x, op.const(np.array(REVERSED[: form.channels or 3])), axis=1)
    if not form.raw:
        x = x / BYTE if form.scale is None else x * form.scale
        for values, is_mean in ((form.mean, True), (form.std, False)):
            if values is not None:
                column = op.const(np.array(values, np.float32).reshape(-1, 1, 1))
                x = x - column if is_mean else x / column
    x = op.Transpose(x, perm=[0, 2, 3, 1]) if form.layout == "NHWC" else x
    return x if dtype == FLOAT else op.Cast(x, to=dtype)

"""Forms of nodes in onnxruntime's blocked layout (NCHWc), one per operator or family of operators.

A form receives a call with large inputs in blocks of b channels, and returns large outputs in blocks. In memory a
blocked tensor is [N, C/b, H, W, b], so

- elementwise operators apply directly;
- images, blocks of channels, rows and columns are contiguous: they are concatenated, sliced and padded through a view;
- a convolution with 1x1 kernels, elsewhere a product per image, is a blocked convolution;
- a product with one factor per channel is a depthwise convolution with one tap; for one factor per channel and image,
  all images are first merged into one; a sum over an image is a depthwise convolution with a tap per pixel, whose
  weight [C, 1, H, W] has the layout of an image.

Measured with onnxruntime 1.31 on two AVX512 cores, float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.backends.forms import Call
from gradgraph.backends.ort_cpu.blocked import pool_by_axis
from gradgraph.backends.ort_cpu.conv import conv_pointwise
from gradgraph.backends.ort_cpu.conv.conv_blocks import blocked_weights, convolution, turned_weights
from gradgraph.backends.ort_cpu.conv.conv_table import layer_of
from gradgraph.backends.ort_cpu.conv.layer import Layer
from gradgraph.backends.ort_cpu.linear_forms import FEWEST_ROWS
from gradgraph.backends.ort_cpu.norm_forms import is_of_batch
from gradgraph.backends.ort_operators import BLOCKED, kernel
from gradgraph.graph.builder import Builder, Var, Written
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import is_number, is_static, sizes_or
from gradgraph.machine.hardware import nchwc_block
from gradgraph.passes.normal.simplifying.peepholes import same_dims
from gradgraph.rules.named_operators import DOMAIN
from gradgraph.rules.norm import batch_normalization_factors, has_few
from gradgraph.rules.registry import key_of
from gradgraph.rules.windows import Windows, windows

POINT = Windows((1, 1), (1, 1), (1, 1), (0, 0), (0, 0))
ELEMENTWISE = (
    *("Abs", "Add", "And", "Cast", "Clip", "Div", "Elu", "Equal", "Erf", "Exp", "Greater", "GreaterOrEqual"),
    *("HardSigmoid", "HardSwish", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Min", "Mul", "Neg", "Not", "Or"),
    *("Pow", "Reciprocal", "Sigmoid", "Sign", "Softplus", "Sqrt", "Sub", "Sum", "Tanh", "ThresholdedRelu", "Where"),
)


Writes = Callable[[Builder, Call], Written]


@dataclass(frozen=True)
class BlockedForm:
    """A way to compute an operator in onnxruntime's blocked layout, NCHWc.

    Attributes:
        write: writes its nodes, and returns the outputs.
        when: whether it supports a call.
        saves: the number of passes over the (largest) tensor that it saves, compared with the plain node.
        waits: whether a node gets no other form before layouts are chosen.
    """

    write: Writes
    when: Callable[[Call], bool]
    saves: Callable[[Call], float]
    waits: Callable[[ir.Node], bool]


class BlockedForms:
    """The table of NCHWc forms of a backend; for calls that no form supports, the table ``extends`` is used."""

    def __init__(self, extends: BlockedForms | None = None) -> None:
        self._rows: dict[tuple[str, str], list[BlockedForm]] = {}
        self._extends = extends

    def add(
        self,
        *op_types: str,
        when: Callable[[Call], bool],
        saves: float | Callable[[Call], float] = 0.0,
        waits: Callable[[ir.Node], bool] = lambda node: True,
        domain: str = "",
    ) -> Callable[[Writes], Writes]:
        """Return a decorator that adds a form of the operators ``op_types``, with fields of :class:`BlockedForm`."""
        passes = saves if callable(saves) else lambda call: saves

        def register(write: Writes) -> Writes:
            for op_type in op_types:
                self._rows.setdefault((domain, op_type), []).append(BlockedForm(write, when, passes, waits))
            return write

        return register

    def knows(self, node: ir.Node) -> bool:
        """Return whether there is a form for which ``node`` waits."""
        own = any(form.waits(node) for form in self._rows.get(key_of(node), ()))
        return own or (self._extends is not None and self._extends.knows(node))

    def of(self, call: Call) -> BlockedForm | None:
        """Return the first NCHWc form that supports ``call``, or None if no form does."""
        own = next((f for f in self._rows.get(key_of(call.node), ()) if f.when(call)), None)
        return self._extends.of(call) if own is None and self._extends is not None else own


STOCK = BlockedForms()
in_blocks = STOCK.add


def inputs_of(call: Call) -> list[Var]:
    """Return the inputs of ``call`` without absent optional ones."""
    return [x for x in call.inputs if x is not None]


def fits(value: ir.Value) -> bool:
    """Return whether ``value`` can be in NCHWc: [N, C, H, W] with several pixels, and C divisible by the block size."""
    dims, block = shape_of(value), nchwc_block()
    if not block or dims is None or len(dims) != 4 or value.dtype not in (ir.DataType.FLOAT, ir.DataType.BOOL):
        return False
    channels, *size = sizes_or(dims[1:], 0)
    return channels > 0 and channels % block == 0 and math.prod(size) > 1 and dims[0] is not None and dims[0] != 0


# --- elementwise ---------------------------------------------------------------------------------------------


def is_alike(call: Call) -> bool:
    """Return whether every operand has either the shape of the result or one element."""
    y = call.node.outputs[0]
    operands = [v for v in call.node.inputs if v is not None]
    return fits(y) and all((fits(v) and same_dims(v, y)) or is_number(shape_of(v), 4) for v in operands)


@in_blocks("Relu", when=is_alike, saves=0.5)  # 0.5, as it may be fused into a convolution
@in_blocks(*ELEMENTWISE, when=is_alike)
def elementwise(op: Builder, call: Call) -> Written:
    written: Written = op.emit(call.node.op_type, *call.inputs, **call.attrs)
    return written


def _tensor_and_column(kind: Callable[[Var, Var], bool], call: Call) -> tuple[Var, Var] | None:
    """Return the operand x that fits NCHWc, and the other one, if ``kind(other, x)``; else None."""
    y = call.node.outputs[0]
    first, second = inputs_of(call)
    pairs = [(first, second)] if call.node.op_type == "Sub" else [(first, second), (second, first)]
    for tensor, other in pairs:
        if fits(y) and fits(tensor.value) and same_dims(tensor.value, y) and kind(other, tensor):
            return tensor, other
    return None


def _is_column(column: Var, tensor: Var) -> bool:
    channels = tensor.dim(1)
    return column.shape in ((channels, 1, 1), (1, channels, 1, 1))


def _is_column_of_images(column: Var, tensor: Var) -> bool:
    """Return whether ``column`` has one number per channel and image, and all sizes are known."""
    return is_static(column.shape) and column.shape == (*(tensor.shape or ())[:2], 1, 1)


@in_blocks("Add", "Mul", "Sub", when=lambda call: _tensor_and_column(_is_column, call) is not None)
def by_channel(op: Builder, call: Call) -> Written:
    """Compute ``a·x``, ``x + b`` or ``x − b``, where a and b have one number per channel."""
    found = _tensor_and_column(_is_column, call)
    assert found is not None
    return _by_column(op, call.node.op_type, *found)


@in_blocks("Add", "Mul", "Sub", when=lambda call: _tensor_and_column(_is_column_of_images, call) is not None)
def by_image(op: Builder, call: Call) -> Written:
    """Compute ``a·x``, ``x + b`` or ``x − b`` with one number per channel and image, as one image of all channels."""
    found = _tensor_and_column(_is_column_of_images, call)
    assert found is not None
    images, channels, *size = _dims(found[0])
    x = op.Reshape(found[0], [1, images * channels, *size])
    return op.Reshape(_by_column(op, call.node.op_type, x, found[1]), [images, channels, *size])


def _by_column(op: Builder, op_type: str, x: Var, column: Var) -> Var:
    """Return ``x`` combined by ``op_type`` with one number per channel."""
    numbers = op.Reshape(column, [-1])
    if op_type == "Mul":
        return _affine(op, x, numbers, None)
    return _affine(op, x, None, op.Neg(numbers) if op_type == "Sub" else numbers)


def _column_and_number(call: Call) -> tuple[Var, float] | None:
    """Return the column [N, C, 1, 1] and the number if ``call`` multiplies the column by a constant image.

    None for any other call. In a constant image, all pixels are the same number.
    """
    first, second = inputs_of(call)
    for column, image in ((first, second), (second, first)):
        flat = image.const is not None and (image.shape or ())[:2] == (1, 1) and len(set(image.const.reshape(-1))) == 1
        if flat and image.const is not None and is_static(column.shape) and (column.shape or ())[2:] == (1, 1):
            return column, float(image.const.reshape(-1)[0])
    return None


@in_blocks("Mul", when=lambda call: fits(call.node.outputs[0]) and _column_and_number(call) is not None)
def spread_column(op: Builder, call: Call) -> Written:
    """Write a column [N, C, 1, 1] times a constant image of equal numbers as an Upsample of the scaled column."""
    found = _column_and_number(call)
    assert found is not None
    y = shape_of(call.node.outputs[0]) or ()
    return kernel(op, "Upsample", BLOCKED, [found[0] * found[1]], y, scales=[1, 1, *y[2:]])


def _affine(op: Builder, x: Var, a: Var | None, b: Var | None) -> Var:
    """Return ``a·x + b`` with per-channel a and b, in one pass; by default a is 1, and b is 0."""
    channels = _dims(x)[1]
    taps = op.const(np.ones([channels, 1, 1, 1], np.float32)) if a is None else op.Reshape(a, [channels, 1, 1, 1])
    return convolution(op, x, taps, b, POINT, channels)


def _is_of_known_size(x: Var) -> bool:
    return fits(x.value) and is_static(x.shape)


def _dims(x: Var) -> list[int]:
    return sizes_or(x.shape, -1)


# --- 1x1 kernels ---------------------------------------------------------------------------------------------


def _pointwise(call: Call) -> Layer | None:
    """Return the layer of a Conv with 1x1 kernels, or of its input gradient, if both images fit NCHWc; else None."""
    conv, (image, *_), (result,) = layer_of(call), call.node.inputs, call.node.outputs
    if conv is None or not conv.images or not conv_pointwise.serves(conv):
        return None
    return conv if image is not None and fits(image) and fits(result) else None


def _is_pointwise(call: Call) -> bool:
    return _pointwise(call) is not None


def _awaits_layout(node: ir.Node) -> bool:
    return _is_pointwise(Call.of(Builder(), node))


def _passes_saved(call: Call) -> float:
    """Return how many passes over the larger image a blocked convolution saves, compared with products per image.

    For 8 and 32 images of 16 to 2048 channels and 7 to 112 px, it mostly takes 0.7 to 0.95 of the time (0.47 to 1.1),
    with AVX2 and AVX512: each channel of the smaller image saves 1/200 of a pass. A product also packs the image that
    it reads, in half a pass if this is the larger one. Steps with AVX2: MobileNetV3-Large 0.92, MobileNetV2 0.96,
    ResNet-50 0.97, MobileNetV3-small 0.98, EfficientNet-B0 0.99.
    """
    images = (call.node.inputs[0], call.node.outputs[0])
    read, written = (sizes_or((shape_of(v) or ())[1:2], 0)[0] for v in images if v is not None)
    return min(read, written) / 200 + (0.5 if read > written else 0.0)


@in_blocks("Conv", when=_is_pointwise, saves=_passes_saved, waits=_awaits_layout)
def pointwise(op: Builder, call: Call) -> Written:
    conv, (x, w, *b) = _pointwise(call), inputs_of(call)
    assert conv is not None
    return convolution(op, x, blocked_weights(op, w, conv), b[0] if b else None, POINT, 1)


@in_blocks("ConvGradInput", domain=DOMAIN, when=_is_pointwise, saves=_passes_saved, waits=_awaits_layout)
def pointwise_dx(op: Builder, call: Call) -> Written:
    conv, (dy, w, _) = _pointwise(call), inputs_of(call)
    assert conv is not None
    return convolution(op, dy, turned_weights(op, w, conv, np.zeros(1, int), POINT), None, POINT, 1)


# --- windows -------------------------------------------------------------------------------------------------


def _is_pool(call: Call) -> bool:
    """Return whether ``call`` is a pool over images without dilation, ``ceil_mode`` and Indices."""
    x, (y, *others) = call.node.inputs[0], call.node.outputs
    plain = call.attrs.get("auto_pad", "NOTSET") in ("NOTSET", "") and not call.attrs.get("ceil_mode")
    dilated = any(d != 1 for d in call.attrs.get("dilations", ()))
    if x is None or not plain or dilated or not fits(x) or any(v.uses() or v.is_graph_output() for v in others):
        return False
    return is_static((shape_of(y) or (None,) * 4)[2:]) and len(call.attrs["kernel_shape"]) == 2


@in_blocks("AveragePool", "MaxPool", when=_is_pool, saves=1.0)  # a third of the plain form's time
def pool(op: Builder, call: Call) -> Written:
    return kernel(op, call.node.op_type, BLOCKED, inputs_of(call), shape_of(call.node.outputs[0]), **call.attrs)


NEAREST = {("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"), ("half_pixel", "round_prefer_ceil")}


def _repeats_pixels(call: Call) -> bool:
    """Return whether ``call`` is a Resize that repeats each pixel a whole number of times along each axis."""
    x, y = call.node.inputs[0], call.node.outputs[0]
    kind = (call.attrs.get("coordinate_transformation_mode"), call.attrs.get("nearest_mode"))
    if x is None or call.attrs.get("mode") != "nearest" or kind not in NEAREST or not (fits(x) and fits(y)):
        return False
    times, scales = _scales(x, y), call.inputs[2] if len(call.inputs) > 2 else None
    if not all(t.is_integer() for t in times):
        return False
    if scales is not None and scales.shape != (0,):  # 3 pixels scaled by 2.1 become 6, not each twice
        return scales.const is not None and scales.const.tolist() == [1, 1, *times]
    return "axes" not in call.attrs


def _scales(x: ir.Value, y: ir.Value) -> list[float]:
    """Return the ratios of the sizes of images y to x, for height and width; an axis of unknown size is omitted."""
    rows = zip((shape_of(x) or ())[2:], (shape_of(y) or ())[2:], strict=True)
    return [m / n for n, m in rows if isinstance(n, int) and isinstance(m, int)]


@in_blocks("Resize", when=_repeats_pixels, saves=1.0)
def resize(op: Builder, call: Call) -> Written:
    """Write a Resize that repeats pixels as Upsample, for which onnxruntime has an NCHWc kernel."""
    x, y = inputs_of(call)[0], call.node.outputs[0]
    scales = [1, 1, *map(int, _scales(x.value, y))]
    return kernel(op, "Upsample", BLOCKED, [x], shape_of(y), scales=scales)


def _pools_along_axes(call: Call) -> bool:
    """Return whether ``pool_by_axis`` supports ``call``, a gradient of MaxPool."""
    dy, x = inputs_of(call)
    if not (_is_of_known_size(x) and fits(dy.value)) or call.attrs.get("ceil_mode"):
        return False
    seen = windows(**call.attrs)
    return x.value.dtype == ir.DataType.FLOAT and pool_by_axis.serves(seen, _dims(x)[2:], _dims(dy)[2:])


@in_blocks("MaxPoolGrad", domain=DOMAIN, when=_pools_along_axes, saves=3.0)  # 3 passes, as Indices are expensive
def max_pool_gradient(op: Builder, call: Call) -> Written:
    dy, x = inputs_of(call)
    return pool_by_axis.to_first_largest(op, dy, x, windows(**call.attrs))


# --- contiguous memory ---------------------------------------------------------------------------------------


@in_blocks("Concat", when=lambda call: call.attrs["axis"] % 4 == 1 and all(fits(x.value) for x in inputs_of(call)))
def concat(op: Builder, call: Call) -> Written:
    return op.Concat(*call.inputs, axis=1)


def _splits_channels(call: Call) -> bool:
    return call.attrs.get("axis", 0) % 4 == 1 and all(map(fits, (inputs_of(call)[0].value, *call.node.outputs)))


@in_blocks("Split", when=_splits_channels)
def split(op: Builder, call: Call) -> Written:
    return op.Split(*call.inputs, outputs=len(call.node.outputs), **call.attrs)


def _pads(call: Call) -> np.ndarray | None:
    """Return the pads before and after, [2, 4], if only height and width are padded, by constants; else None."""
    x, pads = inputs_of(call)[0], inputs_of(call)[1].const
    if not fits(x.value) or not fits(call.node.outputs[0]):
        return None
    constant = call.attrs.get("mode", "constant") == "constant" and len(call.inputs) < 4
    if not constant or pads is None or pads.size != 8 or pads.reshape(2, 4)[:, :2].any():
        return None
    return pads.reshape(2, 4)


@in_blocks("Pad", when=lambda call: _pads(call) is not None)
def pad(op: Builder, call: Call) -> Written:
    """Write a Pad of height and width as a Pad of each block of channels, viewed as [H, W·b]; negative pads crop."""
    x, _, *value = inputs_of(call)
    pads = _pads(call)
    assert pads is not None
    (_, channels, high, wide), block, (top, left), (bottom, right) = _dims(x), nchwc_block(), *pads[:, 2:]
    lines = op.Reshape(x, [-1, high, wide * block])
    padded = op.Pad(lines, [0, top, left * block, 0, bottom, right * block], *value)
    return op.Reshape(padded, [-1, channels, high + top + bottom, wide + left + right])


# --- sums over images ----------------------------------------------------------------------------------------


def _means(op: Builder, x: Var) -> Var:
    """Return the mean per channel and image, [N, C, 1, 1], which is the same in NCHWc and NCHW."""
    _, channels, *size = _dims(x)
    (pieces, _), each = _pieces(size), _means_of_pieces(op, x)
    if pieces == 1:
        return each
    return op.Reshape(op.ReduceMean(_by_piece(op, each, channels, pieces), [2], keepdims=0), [-1, channels, 1, 1])


def _means_of_pieces(op: Builder, x: Var) -> Var:
    """Return the mean per channel and piece (see ``_pieces``), in NCHWc."""
    images, (_, channels, *size) = (x.shape or (None,))[0], _dims(x)
    pieces, piece = _pieces(size)
    if pieces == 1:
        return kernel(op, "GlobalAveragePool", BLOCKED, [x], (images, channels, 1, 1))
    cut = op.Reshape(x, [1, -1, *piece])
    return kernel(op, "GlobalAveragePool", BLOCKED, [cut], (1, None, 1, 1))


def _pieces(size: list[int]) -> tuple[int, tuple[int, int]]:
    """Return the number of pieces of an image whose pixels are summed separately, and the size of each.

    A piece is a run of rows, or of pixels of a single row. Summing 128 px pixel by pixel has seven times the rounding
    error of runs of four rows, which take no longer.
    """
    high, wide = size
    length = high if high > 1 else wide
    count = max(r for r in range(1, length + 1) if length % r == 0 and 16 * r * r <= max(high * wide, 16))
    return count, (high // count, wide) if high > 1 else (1, wide // count)


def _by_piece(op: Builder, each: Var, channels: int, pieces: int) -> Var:
    """Reshape ``each``, one number per run of rows and channel in NCHWc, to [N, C/b, pieces, b]."""
    block = nchwc_block()
    return op.Reshape(each, [-1, channels // block, pieces, block])


def _sums_images(call: Call) -> bool:
    """Return whether ``call`` is a reduction over height and width."""
    x, *axes = inputs_of(call)
    chosen = axes[0].const if axes else None
    return fits(x.value) and chosen is not None and sorted(int(a) % 4 for a in chosen) == [2, 3]


@in_blocks("ReduceMean", "ReduceSum", when=_sums_images)
def over_images(op: Builder, call: Call) -> Written:
    """Compute ``Σ x`` or the mean over each image, per channel: [N, C] or [N, C, 1, 1]."""
    x = inputs_of(call)[0]
    means = _means(op, x)
    total = means if call.node.op_type == "ReduceMean" else means * float(math.prod(_dims(x)[2:]))
    return total if call.attrs.get("keepdims", 1) else op.Reshape(total, [-1, _dims(x)[1]])


@in_blocks("GlobalAveragePool", when=lambda call: fits(inputs_of(call)[0].value))
def global_average(op: Builder, call: Call) -> Written:
    return _means(op, inputs_of(call)[0])


def _dots(op: Builder, x: Var, y: Var) -> Var:
    """Return ``Σ x·y`` per channel, computed by a convolution whose filters are the pieces of images of y."""
    images, channels, high, wide = _dims(x)
    pieces, size = _pieces([high, wide])
    maps = images * channels * pieces
    whole = Windows(size, (1, 1), (1, 1), (0, 0), (0, 0))
    each = convolution(op, op.Reshape(x, [1, maps, *size]), op.Reshape(y, [maps, 1, *size]), None, whole, maps)
    return _channel_sums(op, each, x)


def _channel_sums(op: Builder, each: Var, x: Var) -> Var:
    """Return the sum per channel of ``each``, one number per piece (see ``_pieces``) and channel of x, in NCHWc.

    With ``FEWEST_ROWS`` images or more, a product sums over the images first (see ``linear_forms.row_of_ones``). For 32
    images of 64 to 960 channels, this takes 0.05 to 0.6 of the time of summing the pieces of each image first, or of
    ReduceMean over images and pieces. For fewer images, it takes up to 2.5 times as long.
    """
    images, channels, *size = _dims(x)
    (pieces, _), block = _pieces(size), nchwc_block()
    if images < FEWEST_ROWS:
        of_image = op.ReduceSum(_by_piece(op, each, channels, pieces), [2], keepdims=0)
        return op.Reshape(op.ReduceSum(of_image, [0], keepdims=0), [channels])
    total = op.ReduceSum(op.Reshape(each, [images, channels * pieces]), [0], keepdims=0)
    of_pieces = op.Reshape(total, [channels // block, pieces, block])
    return op.Reshape(op.ReduceSum(of_pieces, [1], keepdims=0), [channels])


def _channel_means(op: Builder, x: Var) -> Var:
    """Return the mean per channel."""
    images, _, *size = _dims(x)
    if images < FEWEST_ROWS:
        return op.ReduceMean(_means(op, x), [0, 2, 3], keepdims=0)
    return _channel_sums(op, _means_of_pieces(op, x), x) * (1.0 / (images * _pieces(size)[0]))


# --- BatchNormalization --------------------------------------------------------------------------------------


def _takes_batch_statistics(call: Call) -> bool:
    """Return whether a BatchNormalization's three outputs depend on batch statistics only."""
    return is_of_batch(call.attrs) and len(call.node.outputs) == 3 and _is_of_known_size(inputs_of(call)[0])


@in_blocks("BatchNormalization", when=_takes_batch_statistics, saves=1.0)  # the plain form is single-threaded
def batch_normalization(op: Builder, call: Call) -> Written:
    """Write BatchNormalization in training mode in four passes: mean, centred x, variance, affine function.

    The gradient computes the centred x by equal nodes, so that it is computed only once.
    """
    x, scale, bias = inputs_of(call)[:3]
    mean = _channel_means(op, x)
    centred = _affine(op, x, None, op.Neg(mean))
    var = _dots(op, centred, centred) * (1.0 / _count(x))
    a = scale * op.Reciprocal(op.Sqrt(var + call.attrs["epsilon"]))
    return _affine(op, centred, a, bias), mean, var


def _has_many_of_known_size(call: Call) -> bool:
    x = inputs_of(call)[1]
    return _is_of_known_size(x) and not has_few(x)


@in_blocks("BatchNormalizationGrad", domain=DOMAIN, when=_has_many_of_known_size, saves=1.0)
def batch_normalization_gradient(op: Builder, call: Call) -> Written:
    """Compute ``dx = (a·dy − a·s) + (−a·k)·centred``, whose sum is fused; symbols as in ``_normalized``."""
    dy = inputs_of(call)[0]
    centred, (dscale, a, k, s), db = _normalized(op, call)
    return _affine(op, dy, a, op.Neg(a * s)) + _affine(op, centred, op.Neg(a * k), None), dscale, db


@in_blocks("UnscaledBatchNormalizationGrad", domain=DOMAIN, when=_has_many_of_known_size, saves=1.0)
def unscaled_batch_normalization_gradient(op: Builder, call: Call) -> Written:
    """Compute ``u = dy + ((−k)·centred − s)``, where ``dx = a·u``; see ``_normalized`` for a, k, s and centred."""
    dy = inputs_of(call)[0]
    centred, (dscale, a, k, s), db = _normalized(op, call)
    return dy + _affine(op, centred, op.Neg(k), op.Neg(s)), a, dscale, db


def _normalized(op: Builder, call: Call) -> tuple[Var, tuple[Var, ...], Var]:
    """Return x minus its mean (centred), ``batch_normalization_factors`` (dscale, a, k, s) and the bias gradient."""
    dy, x, scale, mean, var = inputs_of(call)
    centred = _affine(op, x, None, op.Neg(mean))
    db = _channel_means(op, dy) * _count(x)
    dots = _dots(op, dy, centred)
    return centred, batch_normalization_factors(op, x, scale, var, db, dots, call.attrs["epsilon"]), db


def _count(x: Var) -> float:
    images, _, *size = _dims(x)
    return float(images * math.prod(size))

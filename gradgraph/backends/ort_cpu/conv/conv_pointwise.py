"""Convolution with a 1x1 kernel: matrix products per image, without copies if the stride is 1.

y = W x        dx = Wᵀ dy        dw = Σ dy xᵀ  over the images

The batch size may be unknown.
"""

from __future__ import annotations

from gradgraph.backends.ort_cpu.conv.conv_table import CONVOLUTIONS, conv_form
from gradgraph.backends.ort_cpu.conv.layer import Layer
from gradgraph.backends.ort_operators import matmul
from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.registry import case, real

LEAST_WINDOWS_ALONE = 128  # minimum windows per image for which a product per image pays
# minimum elements of x and dy per weight and image for which their product is computed image by image
LEAST_ELEMENTS_PER_WEIGHT = 0.9
LEAST_WINDOWS_READ, LEAST_IMAGES_READ = 64, 8  # minimum windows and images for which copying the pixels read pays

STRIDED = (
    case(real(8, 5, 9, 8), real(16, 5, 1, 1), strides=[2, 3]),
    case(real(8, 32, 8, 7), real(3, 32, 1, 1), strides=[2, 1]),
    case(real(2, 6, 21), real(4, 6, 1), strides=[4]),
)


def serves(conv: Layer) -> bool:
    """Return whether the layer has one group, a 1x1 kernel, stride 1 and no padding."""
    return conv.group == 1 and conv.seen.pointwise and conv.size == conv.count


def _many_windows(conv: Layer) -> bool:
    return conv.windows >= LEAST_WINDOWS_ALONE


@conv_form("Conv", serves=serves, when=_many_windows)
def per_image(op: Builder, conv: Layer, x: Var, w: Var, b: Var | None = None) -> Var:
    """Compute y as W times each image.

    For images of 12 px or more, it takes 0.5 to 0.9 times PyTorch's time; onnxruntime's Conv takes 0.7 to 1.3 times.
    """
    rows, xs = op.Reshape(w, [conv.m, conv.c]), op.Reshape(x, [-1, conv.c, conv.pixels])
    if b is None:
        y = rows @ xs
    elif conv.m > conv.c:  # appending a channel of ones to x is cheaper than writing y twice
        y = op.Concat(rows, op.Reshape(b, [conv.m, 1]), axis=1) @ op.Pad(xs, [0, 0, 0, 0, 1, 0], 1.0)
    else:
        y = rows @ xs + op.Reshape(b, [conv.m, 1])
    return op.Reshape(y, [-1, conv.m, *conv.count])


@conv_form("ConvGradInput", serves=serves, when=_many_windows)
def per_image_dx(op: Builder, conv: Layer, dy: Var, w: Var, x: Var) -> Var:
    """Compute dx as Wᵀ times dy of each image, in 0.7 to 0.9 times PyTorch's time for images of 12 px or more."""
    turned = op.Transpose(op.Reshape(w, [conv.m, conv.c]), perm=[1, 0])
    return op.Reshape(turned @ op.Reshape(dy, [-1, conv.m, conv.windows]), [-1, conv.c, *conv.size])


def _sums_are_small(conv: Layer) -> bool:
    """Return whether adding up the products of all images takes no longer than one product of x and y, gathered first.

    For 16 images of 12 and 14 px, products per image take 0.45 to 0.9 of the time here, and for 32 images up to 1.0;
    below the limit up to 1.05 (512 to 1024 channels), and 1.6 for 7 px.
    """
    return conv.windows * (conv.c + conv.m) >= LEAST_ELEMENTS_PER_WEIGHT * conv.c * conv.m


@conv_form("ConvGradWeight", serves=serves, when=_sums_are_small)
def per_image_dw(op: Builder, conv: Layer, x: Var, dy: Var, w: Var) -> Var:
    """Compute dw as the sum over images of dy times xᵀ, in 0.4 to 0.9 times PyTorch's time.

    One product over all images, gathered first, takes 1.2 to 2.4 times PyTorch's time. The larger matrix is the left
    factor, as onnxruntime packs the right one.
    """
    return _larger_first(op, conv, *_of_images(op, conv, x, dy), w)


def _skips_pixels(conv: Layer) -> bool:
    """Return whether the layer has one group, a 1x1 kernel, a stride above 1 and no padding."""
    seen = conv.seen
    return conv.group == conv.taps == 1 and not any(seen.pads) and max(seen.strides) > 1


def _enough(conv: Layer) -> bool:
    return conv.windows >= LEAST_WINDOWS_READ and conv.images >= LEAST_IMAGES_READ


@conv_form("ConvGradWeight", (*CONVOLUTIONS, *STRIDED), serves=_skips_pixels, when=_enough)
def read_pixels_dw(op: Builder, conv: Layer, x: Var, dy: Var, w: Var) -> Var:
    """Compute dw from the pixels of x that windows read, as a product per image, or of all images if these are small.

    CPU time relative to ``images_innermost_dw``, which transposes all pixels, stride 2: 256 to 512 channels at 56 px
    0.82, 512 to 1024 at 28 px 0.92, 64 to 128 at 16 px 0.62, 1024 to 2048 at 14 px 1.0; for y of 4 px 0.93 to 1.1.
    """
    ends = [(n - 1) * s + 1 for n, s in zip(conv.count, conv.seen.strides, strict=True)]
    axes = [2 + axis for axis in range(conv.seen.rank)]
    read = op.Slice(x, [0] * conv.seen.rank, ends, axes, list(conv.seen.strides))
    xs, dys = _of_images(op, conv, read, dy)
    if not _sums_are_small(conv):
        xs, dys = (op.Reshape(op.Transpose(v, perm=[1, 0, 2]), [v.dim(1), -1]) for v in (xs, dys))
    return _larger_first(op, conv, xs, dys, w)


def _of_images(op: Builder, conv: Layer, x: Var, dy: Var) -> tuple[Var, Var]:
    """Return x and dy as matrices of all images, [N, channels, windows]."""
    return op.Reshape(x, [-1, conv.c, conv.windows]), op.Reshape(dy, [-1, conv.m, conv.windows])


def _larger_first(op: Builder, conv: Layer, xs: Var, dys: Var, w: Var) -> Var:
    """Return dy times xᵀ, summed over images if there are several matrices; the larger matrix is the left factor."""
    left, right = (xs, dys) if conv.c > conv.m else (dys, xs)
    dw = matmul(op, left, right, right=True)
    if left.rank == 3:
        dw = op.ReduceSum(dw, [0], keepdims=0)
    return op.Reshape(op.Transpose(dw, perm=[1, 0]) if conv.c > conv.m else dw, w.shape)

"""Convolution with the images innermost, [channels, pixels, images]: one matrix product over the whole batch.

``col`` [channels·taps, windows·images] is the im2col matrix, gathered in rows as long as the batch. Then

    y = W col        dW = dY colᵀ        dX = Sᵀ (Wᵀ dY)

where S maps each tap of each window to the pixel that it reads. The weights are used unchanged: only x and y are
transposed. This suits small maps with many channels, where most memory traffic is due to weights.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.backends.ort_cpu.conv.conv_table import conv_form
from gradgraph.backends.ort_cpu.conv.layer import Layer
from gradgraph.backends.ort_operators import matmul
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import known_sizes

MOST_WINDOWS_UNBLOCKED = 49  # maximum windows per image: with more, blocks are faster, as their rows are longer
MOST_PIXELS_UNBLOCKED = 16  # the same maximum for 1x1 kernels
MOST_WINDOWS_AS_COLUMNS = 256  # windows per image up to which im2col of the whole batch is fastest for dw,
LEAST_IMAGES_FOR_MORE = 16  # or four times as many windows with at least this many images
CHANNELS_BEYOND_A_STEM = 4  # with fewer channels of x, im2col is fastest for maps of any size, unless a Scan pays
LEAST_WORK_OF_A_TURN = 4 << 20  # minimum multiplications per image for which an iteration of a Scan pays
LEAST_IMAGES_AS_ROWS = 8  # minimum number of images for which rows as long as the batch pay
MOST_SUMS = 1 << 18  # maximum elements of S: its product mostly multiplies by zeros
LEAST_CHANNELS_UNTURNED = 256  # channels of y from which dw is not computed transposed
MOST_COLUMN_BYTES = 12 << 20  # bytes of columns computed at once, so that they stay in the cache


def is_worth_a_turn(conv: Layer) -> bool:
    """Return whether an image is enough work for an iteration of a Scan over images."""
    return conv.m * conv.fan_in * conv.windows >= LEAST_WORK_OF_A_TURN


def _few_windows(conv: Layer) -> bool:
    most = MOST_WINDOWS_UNBLOCKED if conv.taps > 1 else MOST_PIXELS_UNBLOCKED
    return conv.group == 1 and conv.windows <= most and conv.images >= LEAST_IMAGES_AS_ROWS


def _some_windows(conv: Layer) -> bool:
    """Return whether im2col is fastest for dw: with few windows, or in a first layer, which has few channels."""
    many_images = conv.images >= LEAST_IMAGES_FOR_MORE
    stem = many_images and conv.c < CHANNELS_BEYOND_A_STEM and not is_worth_a_turn(conv)
    most = MOST_WINDOWS_AS_COLUMNS * 4 if many_images else MOST_WINDOWS_AS_COLUMNS
    return conv.group == 1 and conv.images >= LEAST_IMAGES_AS_ROWS and (conv.windows <= most or stem)


@conv_form("Conv", when=_few_windows)
def images_innermost(op: Builder, conv: Layer, x: Var, w: Var, b: Var | None = None) -> Var:
    """Compute y as one product of the weights and the im2col matrix with images innermost.

    Times relative to PyTorch (NCHWc in parentheses): 512 channels at 7 px: 1.2 (1.3); 256 at 4 px: 1.1 (1.5); 512 at 2
    px: 0.7 (2.7).
    """
    y = _stack(op, w, conv, conv.m, conv.fan_in) @ _columns(op, x, conv)
    if b is not None:
        y = op.Reshape(y, [conv.group * conv.m, -1]) + op.Reshape(b, [-1, 1])
    return _images_first(op, y, conv.group * conv.m, conv.count)


@conv_form("ConvGradInput", when=_few_windows)
def images_innermost_dx(op: Builder, conv: Layer, dy: Var, w: Var, x: Var) -> Var | None:
    """Compute the product of the transposed weights and dy; a constant matrix S adds its rows to pixels of dx.

    Times relative to PyTorch (NCHWc in parentheses): 512 channels at 7 px: 1.5 (1.7); 256 at 4 px: 1.5 (2.5); 512 at 2
    px: 0.8 (4.7). None if S would have more than ``MOST_SUMS`` elements.
    """
    reads = conv.reads().reshape(-1)
    channels = conv.group * conv.c
    seen = matmul(
        op, _stack(op, w, conv, conv.m, conv.fan_in), _stack(op, _images_last(op, dy), conv, conv.m, -1), left=True
    )
    if not _is_whole(reads, conv):
        if reads.size * conv.pixels > MOST_SUMS:
            return None
        sums = (reads == np.arange(conv.pixels)[:, None]).astype(np.float32)
        seen = op.const(sums) @ op.Reshape(seen, [channels, reads.size, -1])
    return _images_first(op, seen, channels, conv.size)


@conv_form("ConvGradWeight", when=_some_windows)
def images_innermost_dw(op: Builder, conv: Layer, x: Var, dy: Var, w: Var) -> Var:
    """Compute dw as the product of dy and the transposed im2col matrix, or transposed if y has few channels.

    It takes 0.4 to 1.5 times PyTorch's time, less for smaller maps; a gather with channels innermost takes 1.5 to 15
    times. The smaller matrix is the right factor, which onnxruntime packs.
    """
    dys, shape = _stack(op, _images_last(op, dy), conv, conv.m, -1), w.shape
    if conv.m >= LEAST_CHANNELS_UNTURNED:
        return op.Reshape(matmul(op, dys, _columns(op, x, conv), right=True), shape)
    divisors = (d for d in range(1, conv.c + 1) if conv.c % d == 0)
    chunk = max((d for d in divisors if conv.columns // conv.c * d <= MOST_COLUMN_BYTES), default=1)
    if chunk == conv.c or conv.group > 1 or not isinstance(conv.batch, int):
        product = matmul(op, _columns(op, x, conv), dys, right=True)
    else:
        product = _by_channels(op, x, dys, conv, chunk)
    turned = op.Transpose(product, perm=[1, 0] if conv.group == 1 else [0, 2, 1])
    return op.Reshape(turned, shape)


# --- layouts -------------------------------------------------------------------------------------------------


def _images_last(op: Builder, x: Var) -> Any:
    rest = math.prod(known_sizes((x.shape or ())[1:]))
    return op.Transpose(op.Reshape(x, [-1, rest]), perm=[1, 0])


def _images_first(op: Builder, y: Var, channels: int, space: tuple[int, ...]) -> Var:
    """Convert ``y``, [C, pixels, N] with any merged axes, to [N, C, *space]."""
    flat = op.Reshape(y, [channels * int(np.prod(space)), -1])
    return op.Reshape(op.Transpose(flat, perm=[1, 0]), [-1, channels, *space])


def _stack(op: Builder, x: Var, conv: Layer, rows: int, columns: int) -> Any:
    """Reshape ``x`` to one matrix of ``rows`` x ``columns`` per group; without a group axis for one group."""
    return op.Reshape(x, [rows, columns] if conv.group == 1 else [conv.group, rows, columns])


def _columns(op: Builder, x: Var, conv: Layer) -> Any:
    """Return the im2col matrix, [c·taps, windows·N] per group."""
    return _stack(op, _gathered(op, _padded(op, x, conv), conv), conv, conv.fan_in, -1)


def _padded(op: Builder, x: Var, conv: Layer) -> Any:
    """Return the images as [C, pixels, N], plus one row of zeros per channel if any window reads padding."""
    pixels = op.Reshape(_images_last(op, x), [conv.group * conv.c, conv.pixels, -1])
    return op.Pad(pixels, [0, 0, 0, 0, 1, 0]) if conv.reads().max() == conv.pixels else pixels


def _gathered(op: Builder, padded: Var, conv: Layer) -> Any:
    reads = conv.reads().reshape(-1)
    return padded if _is_whole(reads, conv) else op.Gather(padded, reads, axis=1)


def _is_whole(reads: np.ndarray, conv: Layer) -> bool:
    """Whether each window is exactly one pixel, as for a 1x1 kernel of stride 1."""
    return np.array_equal(reads, np.arange(conv.pixels))


# --- the weight gradient in pieces that fit into the cache ------------------------------------------------------


def _by_channels(op: Builder, x: Var, dys: Var, conv: Layer, chunk: int) -> Any:
    """Compute the transposed dw, [c·taps, m], in a Scan over ``chunk`` channels of x at a time."""
    padded = _padded(op, x, conv)
    rows = padded.shape[1]
    piece = ir.Value(name="channels", type=padded.value.type, shape=ir.Shape([chunk, rows, conv.batch]))

    def step(channels: Var) -> list[Var]:
        return [matmul(op, op.Reshape(_gathered(op, channels, conv), [chunk * conv.taps, -1]), dys, right=True)]

    pieces = op.Reshape(padded, [conv.c // chunk, chunk, rows, conv.batch])
    products = op.Scan(pieces, body=op.graph([piece], step, "channels"), num_scan_inputs=1)
    products.value.type = padded.value.type
    return op.Reshape(products, [conv.fan_in, conv.m])

"""Blocked convolution with fewer products: several rows of y at once, by Winograd's minimal filtering along columns.

m rows of y with r vertical taps need ``m·r`` products per horizontal tap directly, and ``n = m + r - 1`` by Winograd.
Rows of x, taps and rows of y are polynomials, evaluated at n points (the last is ∞):

    y = Aᵀ [(G w) ∘ (Bᵀ x)]        A [n, m], G [n, r], B [n, n], ∘ multiplies elementwise

A tile is the m rows of y that are computed together. There are six points: with 3 taps, a tile has 4 rows and needs
half the products; with 5 taps, it has 2 rows and needs three fifths. Horizontally nothing changes: each point is a
blocked convolution with one row of taps.

    Bᵀ x    a depthwise convolution for each point, as high as a tile and a tile's m rows apart
    G w     a product with the weights in blocks
    Aᵀ      a product with the results as [images, points, all other axes]; a Gather of rows then puts rows in order

The points are 0, 1, -1, 1/2, -2 and ∞: with them the rounding error for 128 channels is 1.6 to 1.8 times that of direct
sums, in float32; with ±2 in place of 1/2 and -2 it is 2 to 2.3 times.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.polynomial import polynomial

from gradgraph.backends.ort_cpu.conv.conv_blocks import (
    blocked_weights,
    convolution,
    fits_blocks,
    ordered,
    reordered,
    turned_weights,
)
from gradgraph.backends.ort_cpu.conv.conv_images import MOST_WINDOWS_UNBLOCKED
from gradgraph.backends.ort_cpu.conv.conv_table import conv_form
from gradgraph.backends.ort_cpu.conv.layer import Layer
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.shapes import known_sizes, record_shape
from gradgraph.machine.hardware import nchwc_block
from gradgraph.rules.windows import Windows

POINTS = (0.0, 1.0, -1.0, 0.5, -2.0)  # and ∞
SIX = len(POINTS) + 1
ONE = POINTS.index(1.0)  # the point whose result has the factor 1 in every row of y, so that it can include the bias
TO_READ, TO_WRITE = 720, 320  # the cost of tiles per element of x and of y, in multiplications
LEAST_WINDOWS_FOR_TILES = 512  # minimum windows of all images for which transforming the weights pays
# the share of products to be saved if images have so few windows that the alternative is ``images_innermost``: with 256
# channels at 4 px (half of them saved), tiles take 0.7 of its time forward and 0.55 backward, at 7 px 0.6; at 3, 5 and
# 6 px (a third or less) 1.0 to 1.3
LEAST_SAVED_OF_FEW = 0.4
# elements of x and y up to which tiles are used: they need 2.5 times as many, at the peak of a step's memory
MOST_NUMBERS = 3 << 19


def serves(conv: Layer) -> bool:
    """Return whether tiles support the layer: x and y fit NCHWc, stride 1, 3 to 5 undilated vertical taps.

    With 2 taps, the rounding error would be larger.
    """
    seen = conv.seen
    if conv.group > 1 or not fits_blocks(1, conv.m, conv.c) or conv.c < nchwc_block():
        return False
    if seen.rank != 2 or set(seen.strides) != {1} or seen.dilations[0] != 1 or min(seen.pads) < 0:
        return False
    taps = seen.kernel[0] or 1
    return 2 < taps < SIX and max(seen.begins[0], seen.ends[0]) < taps


def pays(conv: Layer, backwards: bool = False) -> bool:
    """Return whether saved multiplications outweigh transforms of x and y (with ``backwards``, of dy and dx)."""
    if conv.images * conv.windows < LEAST_WINDOWS_FOR_TILES:
        return False
    if conv.images * (conv.c * math.prod(conv.size) + conv.m * math.prod(conv.count)) > MOST_NUMBERS:
        return False
    (read, written), high = ((conv.m, conv.c), conv.size[0]) if backwards else ((conv.c, conv.m), conv.count[0])
    tiles = -(-high // _rows(conv.seen)) / high  # per row
    share = 1 - SIX * tiles / (conv.seen.kernel[0] or 1)
    if conv.windows <= MOST_WINDOWS_UNBLOCKED and share < LEAST_SAVED_OF_FEW:
        return False
    return conv.m * conv.fan_in * share >= (TO_READ * read + TO_WRITE * written) * tiles


@conv_form("Conv", serves=serves, when=pays)
def blocked_tiles(op: Builder, conv: Layer, x: Var, w: Var, b: Var | None = None) -> Var:
    """Compute y by an NCHWc convolution in tiles of rows of y.

    3x3, 128 channels at 32 px: 0.75 of the time of ``blocked``; 256 at 16 px: 0.6; 64 at 64 px: 0.93.
    """
    return _convolve(op, x, blocked_weights(op, w, conv), b, conv.seen, conv.m)


@conv_form("ConvGradInput", serves=serves, when=lambda conv: pays(conv, backwards=True))
def blocked_tiles_dx(op: Builder, conv: Layer, dy: Var, w: Var, x: Var) -> Var | None:
    """Compute dx by an NCHWc convolution of dy in tiles of rows, with flipped weights and mirrored padding.

    None if a stride is not 1, or a mirrored pad would be negative.
    """
    pads = conv.seen.mirrored
    if pads is None:
        return None
    backwards = replace(conv.seen, begins=tuple(pads[:2]), ends=tuple(pads[2:]))
    blocks = turned_weights(op, w, conv, np.arange(conv.taps)[::-1], backwards)
    return _convolve(op, dy, blocks, None, backwards, conv.c)


def _rows(seen: Windows) -> int:
    return SIX + 1 - (seen.kernel[0] or 1)


def _convolve(op: Builder, x: Var, blocks: Var, b: Var | None, seen: Windows, channels: int) -> Var:
    """Convolve in tiles an NCHW tensor to ``channels`` NCHW channels; ``blocks`` are the reordered weights."""
    high, wide = seen.count(known_sizes((x.shape or ())[2:]))
    tiles = -(-high // _rows(seen))
    across = Windows((1, seen.kernel[1]), (1, 1), seen.dilations, (0, seen.begins[1]), (0, seen.ends[1]))
    parts = []
    pairs = zip(_tiles(op, x, seen, tiles), _weights(op, blocks, seen, channels), strict=True)
    for i, (tile, weights) in enumerate(pairs):
        part = convolution(op, tile, weights, b if i == ONE else None, across, 1)
        parts.append(op.Reshape(part, [-1, 1, channels * tiles * wide]))
    at_points = op.Concat(*parts, axis=1)
    y = op.Reshape(_rows_of_y(op, at_points, seen, (channels, high, wide)), [-1, channels, high, wide])
    record_shape(y.value, (x.dim(0), channels, high, wide))
    return ordered(op, y)


def _tiles(op: Builder, x: Var, seen: Windows, tiles: int) -> Any:
    """Yield ``Bᵀ x`` for each point: an NCHWc tensor [images, channels, tiles, wide]."""
    channels, high, _ = known_sizes((x.shape or ())[1:])
    rows, begin = _rows(seen), seen.begins[0]
    end = rows * (tiles - 1) + SIX - begin - high
    tile = Windows((SIX, 1), (rows, 1), (1, 1), (begin, 0), (end, 0))
    blocks = reordered(op, x)
    for factors in products(seen.kernel[0] or 1)[1]:
        down = np.tile(np.repeat(factors, nchwc_block()), channels // nchwc_block()).astype(np.float32)
        yield convolution(op, blocks, op.const(down.reshape(channels, 1, SIX, 1)), None, tile, channels)


def _weights(op: Builder, blocks: Var, seen: Windows, channels: int) -> Any:
    """Return, for each point, its row of ``G w`` as NCHWc weights with one vertical tap; ``blocks`` has all taps."""
    taps, width, block = seen.kernel[0] or 1, seen.kernel[1] or 1, nchwc_block()
    inputs = blocks.dim(1)
    assert isinstance(inputs, int)
    squares = channels * inputs // block**2
    order = np.arange(squares * taps, dtype=np.int32).reshape(squares, taps).T.reshape(-1)
    by_tap = op.Gather(op.Reshape(blocks, [-1, width * block**2]), order, axis=0)
    made = op.const(products(taps)[2].astype(np.float32)) @ op.Reshape(by_tap, [taps, -1])
    parts = all_of(op.Split(made, axis=0, num_outputs=SIX, outputs=SIX))
    return [op.Reshape(v, [channels, inputs, 1, width]) for v in parts]


def _rows_of_y(op: Builder, at_points: Var, seen: Windows, image: tuple[int, int, int]) -> Any:
    """Return y in NCHWc: ``Aᵀ`` applied to the results ``at_points``, cropped to the rows of the ``image`` y."""
    (channels, high, wide), rows = image, _rows(seen)
    block, tiles = nchwc_block(), -(-high // rows)
    summed = op.const(products(seen.kernel[0] or 1)[0].T.astype(np.float32)) @ at_points
    count = rows * channels // block * tiles
    places = np.arange(count, dtype=np.int32).reshape(rows, channels // block, tiles)
    order = places.transpose(1, 2, 0).reshape(channels // block, -1)[:, :high]  # drop the last tile's excess rows
    return op.Gather(op.Reshape(summed, [-1, count, wide * block]), order.reshape(-1), axis=1)


# --- A, B and G ----------------------------------------------------------------------------------------------


@functools.cache
def products(taps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return A [points, rows], Bᵀ [points, points] and G [points, taps]; the last point is ∞.

    A contains powers of the points; G contains them, too, divided by the product of a point's distances from the
    others. The rows of Bᵀ are the coefficients of polynomials: each is 0 at all points except one, the last (for ∞) at
    all points.
    """
    a, g = (np.vstack([np.vander(POINTS, n, increasing=True), np.eye(n)[-1]]) for n in (SIX + 1 - taps, taps))
    finite = [polynomial.polyfromroots([q for q in POINTS if q != p]) for p in POINTS]
    b = np.vstack([*(np.append(f, 0.0) for f in finite), polynomial.polyfromroots(POINTS)])
    distances = [np.prod([p - q for q in POINTS if q != p]) for p in POINTS]
    return a, b, g / np.array([*distances, 1.0])[:, None]

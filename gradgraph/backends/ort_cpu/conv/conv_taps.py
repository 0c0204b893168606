"""The weight gradient of sequences, tap by tap: x, shifted by a tap, times dy of each image, without im2col.

dw[t] = Σ dy xₜᵀ  over the images, where pixel i of xₜ is pixel i + t·d - p of x, for dilation d and padding p

Each tap takes a pass over x and a product per image, in plain layout: neither x nor dy is transposed. A sequence is an
image with one spatial axis, or with a single axis longer than 1.
"""

from __future__ import annotations

from gradgraph.backends.ort_cpu.conv.conv_table import CONVOLUTIONS, conv_form
from gradgraph.backends.ort_cpu.conv.layer import Layer
from gradgraph.backends.ort_operators import matmul
from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.registry import case, real

LEAST_CHANNELS = 16  # minimum channels of x and y, and
LEAST_WINDOWS = 64  # minimum windows per image: with fewer, products per image are too small
LEAST_WINDOWS_OF_ALL = 512  # minimum windows of all images: with fewer, a node per tap takes longer than its product
MOST_WEIGHTS = 64 * 64  # weights per tap up to which it is the fastest form: with more, adding up products takes longer

SEQUENCES = (
    case(real(8, 6, 64), real(5, 6, 3), pads=[2, 0]),
    case(real(2, 16, 70), real(32, 16, 3), real(32), pads=[8, 8], dilations=[8]),
    case(real(3, 16, 1, 67), real(16, 16, 1, 4), pads=[0, 1, 0, 0]),
)


def serves(conv: Layer) -> bool:
    """Return whether the layer has one group, sequences and a stride of 1, and each tap reads x in some window."""
    plain = conv.group == 1 and set(conv.seen.strides) == {1} and conv.taps == conv.seen.kernel[-1]
    sequences = (conv.pixels, conv.windows) == (conv.size[-1], conv.count[-1])
    return plain and sequences and all(max(-begin, -end) < conv.pixels for begin, end in _shifts(conv))


def _shifts(conv: Layer) -> list[tuple[int, int]]:
    """Return the padding of both ends of x for each tap; negative where x is cropped."""
    begins = [conv.seen.begins[-1] - t * conv.seen.dilations[-1] for t in range(conv.taps)]
    return [(begin, conv.windows - conv.pixels - begin) for begin in begins]


def _pays(conv: Layer) -> bool:
    large = min(conv.m, conv.c) >= LEAST_CHANNELS and conv.windows >= LEAST_WINDOWS
    return large and conv.images * conv.windows >= LEAST_WINDOWS_OF_ALL and conv.m * conv.c <= MOST_WEIGHTS


@conv_form("ConvGradWeight", (*CONVOLUTIONS, *SEQUENCES), serves=serves, when=_pays)
def each_tap_dw(op: Builder, conv: Layer, x: Var, dy: Var, w: Var) -> Var:
    """Compute dw as a sum over images for each tap.

    CPU time relative to ``images_innermost_dw``, with kernels of 3, 64 to 1024 windows: 64 channels 0.65 to 0.97, 32 to
    64 channels 0.6 to 0.8, 16 to 32 channels 0.5 to 0.7; 128 channels 0.8 to 1.2, which a Scan over images undercuts.
    """
    xs, dys = op.Reshape(x, [-1, conv.c, conv.pixels]), op.Reshape(dy, [-1, conv.m, conv.windows])
    sums = []
    for begin, end in _shifts(conv):
        shifted = op.Pad(xs, [0, 0, begin, 0, 0, end]) if begin or end else xs
        sums.append(op.ReduceSum(matmul(op, dys, shifted, right=True), [0], keepdims=1))
    return op.Reshape(op.Transpose(op.Concat(*sums, axis=0), perm=[1, 2, 0]), w.shape)

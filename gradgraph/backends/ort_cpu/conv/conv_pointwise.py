"""Convolution with a 1x1 kernel and stride 1: matrix products of one image each, on what lies in memory as it is.

    y = W x        dx = Wᵀ dy        dw = Σ dy xᵀ  over the images

The batch may be open.
"""

from __future__ import annotations

from typing import Any

from gradgraph.backends.ort_cpu.conv.layer import Layer, layer
from gradgraph.backends.ort_operators import matmul
from gradgraph.graph.builder import Builder, Var


def serves(conv: Layer | None) -> bool:
    return conv is not None and conv.group == 1 and conv.seen.pointwise and conv.size == conv.count


def forward(op: Builder, x: Var, w: Var, b: Var | None = None, **attrs: Any) -> Var | None:
    """Conv."""
    conv = layer(x, w, None, attrs)
    if conv is None or not serves(conv):
        return None
    rows, xs = op.Reshape(w, [conv.m, conv.c]), op.Reshape(x, [-1, conv.c, conv.pixels])
    if b is None:
        y = rows @ xs
    elif conv.m > conv.c:  # x with a channel of ones is less to write than y a second time
        y = op.Concat(rows, op.Reshape(b, [conv.m, 1]), axis=1) @ op.Pad(xs, [0, 0, 0, 0, 1, 0], 1.0)
    else:
        y = rows @ xs + op.Reshape(b, [conv.m, 1])
    return op.Reshape(y, [-1, conv.m, *conv.count])


def input_gradient(op: Builder, dy: Var, w: Var, x: Var, **attrs: Any) -> Var | None:
    """ConvGradInput."""
    conv = layer(x, w, dy, attrs)
    if conv is None or not serves(conv):
        return None
    turned = op.Transpose(op.Reshape(w, [conv.m, conv.c]), perm=[1, 0])
    return op.Reshape(turned @ op.Reshape(dy, [-1, conv.m, conv.windows]), [-1, conv.c, *conv.size])


def weight_gradient(op: Builder, x: Var, dy: Var, w: Var, **attrs: Any) -> Var | None:
    """ConvGradWeight; the larger matrix is the left one, as onnxruntime packs the right one."""
    conv = layer(x, w, dy, attrs)
    if conv is None or not serves(conv):
        return None
    xs, dys = op.Reshape(x, [-1, conv.c, conv.pixels]), op.Reshape(dy, [-1, conv.m, conv.windows])
    if conv.c > conv.m:
        dw = op.Transpose(op.ReduceSum(matmul(op, xs, dys, right=True), [0], keepdims=0), perm=[1, 0])
    else:
        dw = op.ReduceSum(matmul(op, dys, xs, right=True), [0], keepdims=0)
    return op.Reshape(dw, w.shape)

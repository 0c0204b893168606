"""Convolution with a 1x1 kernel and stride 1: matrix products of one image each, on what lies in memory as it is.

    y = W x        dx = Wᵀ dy        dw = Σ dy xᵀ  over the images

The batch may be open.
"""

from __future__ import annotations

from typing import Any

from gradgraph.backends.ort_cpu.conv.layer import Layer, layer
from gradgraph.backends.ort_operators import matmul
from gradgraph.builder import Builder, Var


def serves(it: Layer | None) -> bool:
    return it is not None and it.group == 1 and it.seen.pointwise and it.size == it.count


def forward(op: Builder, x: Var, w: Var, b: Var | None = None, **attrs: Any) -> Var | None:
    """Conv."""
    it = layer(x, w, None, attrs)
    if it is None or not serves(it):
        return None
    rows, xs = op.Reshape(w, [it.m, it.c]), op.Reshape(x, [-1, it.c, it.pixels])
    if b is None:
        y = rows @ xs
    elif it.m > it.c:  # x with a channel of ones is less to write than y a second time
        y = op.Concat(rows, op.Reshape(b, [it.m, 1]), axis=1) @ op.Pad(xs, [0, 0, 0, 0, 1, 0], 1.0)
    else:
        y = rows @ xs + op.Reshape(b, [it.m, 1])
    return op.Reshape(y, [-1, it.m, *it.count])


def input_gradient(op: Builder, dy: Var, w: Var, x: Var, **attrs: Any) -> Var | None:
    """ConvGradInput."""
    it = layer(x, w, dy, attrs)
    if it is None or not serves(it):
        return None
    turned = op.Transpose(op.Reshape(w, [it.m, it.c]), perm=[1, 0])
    return op.Reshape(turned @ op.Reshape(dy, [-1, it.m, it.windows]), [-1, it.c, *it.size])


def weight_gradient(op: Builder, x: Var, dy: Var, w: Var, **attrs: Any) -> Var | None:
    """ConvGradWeight; the larger matrix is the left one, as onnxruntime packs the right one."""
    it = layer(x, w, dy, attrs)
    if it is None or not serves(it):
        return None
    xs, dys = op.Reshape(x, [-1, it.c, it.pixels]), op.Reshape(dy, [-1, it.m, it.windows])
    if it.c > it.m:
        dw = op.Transpose(op.ReduceSum(matmul(op, xs, dys, right=True), [0], keepdims=0), perm=[1, 0])
    else:
        dw = op.ReduceSum(matmul(op, dys, xs, right=True), [0], keepdims=0)
    return op.Reshape(dw, w.shape)

"""Convolution in onnxruntime's blocked layout (NCHWc), whose kernels are the fastest it has for wide maps.

onnxruntime itself goes there only for constant weights. Here the weights, which change every step, are blocked by two
transposes that keep runs of a block each: [out, in, taps] -> [out/b, in/b, taps, b in, b out].
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gradgraph.builder import Builder, Var
from gradgraph.hardware import nchwc_block
from gradgraph.passes.lower.kernels import BLOCKED, kernel
from gradgraph.passes.lower.layer import Layer, layer
from gradgraph.rules.windows import Windows


def forward(op: Builder, x: Var, w: Var, b: Var | None = None, **attrs: Any) -> Var | None:
    """Conv."""
    it = layer(x, w, None, attrs)
    if it is None or not _fits(it.group, it.m, it.c) or it.seen.rank != 2:
        return None
    return _convolve(op, x, _blocked(op, w, it), b, it.seen, it.group)


def input_gradient(op: Builder, dy: Var, w: Var, x: Var, **attrs: Any) -> Var | None:
    """ConvGradInput of stride 1: the windows run backwards over dy, with turned weights."""
    it = layer(x, w, dy, attrs)
    if it is None or not _fits(it.group, it.c, it.m) or it.seen.rank != 2 or it.seen.mirrored is None:
        return None
    pads = it.seen.mirrored
    backwards = replace(it.seen, begins=tuple(pads[:2]), ends=tuple(pads[2:]))
    return _convolve(op, dy, _turned(op, w, it), None, backwards, it.group)


def _fits(group: int, outputs: int, inputs: int) -> bool:
    """Can channels be blocked: depthwise, dense, or so few inputs that these stay as they are?"""
    block = nchwc_block()
    if not block:
        return False
    if group > 1 and outputs == inputs == 1:
        return group % block == 0
    return outputs % block == 0 and (inputs % block == 0 or (inputs < block and group == 1))


def _convolve(op: Builder, x: Var, blocks: Var, b: Var | None, seen: Windows, group: int) -> Var:
    """``blocks`` are the weights in blocks, still of the shape [out, in / group, *kernel]."""
    (batch, inputs, *size), outputs = x.shape or (), (blocks.shape or ())[0]
    if isinstance(inputs, int) and inputs >= nchwc_block():
        x = kernel(op, "ReorderInput", BLOCKED, [x], x.shape)
    shape = (batch, outputs, *seen.count([n for n in size if isinstance(n, int)]))
    y = kernel(op, "Conv", BLOCKED, [x, blocks, b], shape, group=group, kernel_shape=seen.kernel, **seen.attrs)
    return kernel(op, "ReorderOutput", BLOCKED, [y], shape, channels=outputs)


def _blocked(op: Builder, w: Var, it: Layer) -> Any:
    """[out, in, *kernel] in blocks: [out/b, in/b, taps, b in, b out], or [out/b, in·taps, b out] for few inputs."""
    block, outputs = nchwc_block(), it.group * it.m
    rows = op.Transpose(op.Reshape(w, [outputs // block, block, it.fan_in]), perm=[0, 2, 1])
    if it.c >= block and it.taps > 1:
        dense = op.Reshape(rows, [outputs // block * (it.c // block), block, it.taps, block])
        rows = op.Transpose(dense, perm=[0, 2, 1, 3])
    return op.Reshape(rows, w.shape)


def _turned(op: Builder, w: Var, it: Layer) -> Any:
    """The weights that lead from y back to x, in blocks: channels trade places, taps run backwards."""
    block, kernel_shape = nchwc_block(), [k or 1 for k in it.seen.kernel]
    backwards = np.arange(it.taps)[::-1].copy()
    if it.c == it.m == 1:
        rows = op.Transpose(op.Reshape(w, [it.group // block, block, it.taps]), perm=[0, 2, 1])
        return op.Reshape(op.Gather(rows, backwards, axis=1), w.shape)
    rows = op.Transpose(op.Reshape(w, [it.group * it.m, it.c, it.taps]), perm=[0, 2, 1]) if it.taps > 1 else w
    inner = block if it.m >= block else 1
    split = op.Reshape(rows, [it.group, it.m // inner, inner, it.taps, it.c // block, block])
    dense = op.Transpose(split, perm=[0, 4, 1, 3, 2, 5])
    if it.taps > 1:
        dense = op.Gather(dense, backwards, axis=3)
    return op.Reshape(dense, [it.group * it.c, it.m, *kernel_shape])

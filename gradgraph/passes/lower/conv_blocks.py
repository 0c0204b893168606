"""Convolution in onnxruntime's blocked layout (NCHWc), whose kernels are the fastest it has for wide maps.

onnxruntime itself goes there only for constant weights. Here the weights change every step, so they are blocked in the
graph, [out, in, taps] -> [out/b, in/b, taps, b in, b out]: by one transpose and a gather of rows of a block each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    block, inner = nchwc_block(), nchwc_block() if it.c >= nchwc_block() else 1
    outer = it.group * it.m // block
    rows = op.Transpose(op.Reshape(w, [outer, block, it.fan_in]), perm=[0, 2, 1])
    if inner == 1 or it.taps == 1:
        return op.Reshape(rows, w.shape)
    order = _rows((outer, it.c // inner, inner, it.taps), (0, 1, 3, 2))
    return op.Reshape(op.Gather(op.Reshape(rows, [-1, block]), order, axis=0), w.shape)


def _turned(op: Builder, w: Var, it: Layer) -> Any:
    """The weights that lead from y back to x, in blocks: channels trade places, taps run backwards."""
    block, inner, shape = nchwc_block(), nchwc_block() if it.m >= nchwc_block() else 1, w.shape or ()
    taps_first = op.Transpose(op.Reshape(w, [-1, it.taps]), perm=[1, 0]) if it.taps > 1 else w
    rows = op.Reshape(taps_first, [-1, block])
    if it.c == it.m == 1:
        order = _rows((it.taps, it.group // block), (1, 0), backwards=0)
    else:
        sizes = (it.taps, it.group, it.m // inner, inner, it.c // block)
        order = _rows(sizes, (1, 4, 2, 0, 3), backwards=0)
    return op.Reshape(op.Gather(rows, order, axis=0), [it.group * it.c, it.m, *shape[2:]])


def _rows(sizes: Sequence[int], perm: Sequence[int], backwards: int | None = None) -> np.ndarray:
    """The order of rows that transposes ``sizes``, one axis run ``backwards``: onnxruntime gathers in parallel."""
    places = np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes)
    if backwards is not None:
        places = np.flip(places, backwards)
    return places.transpose(perm).reshape(-1)

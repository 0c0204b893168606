"""Gradient rules of operators that move, repeat or drop elements: they move the cotangent back.

All of these operators are linear; cotangents of repeated elements are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.rules.registry import Gradients, case, no_gradient, real, uniform, vjp

# --- helpers -----------------------------------------------------------------------------------------


def reshaped(op: Builder, y: Var, x: Var) -> Var:
    """Return ``y`` in the shape of ``x``."""
    known = x.shape
    if known is None or known.count(0) or len(known) > len(shapes.known_sizes(known)) + 1:
        moved = op.Reshape(y, op.shape(x), allowzero=1)
    else:
        moved = op.Reshape(y, shapes.sizes_or(known, -1))  # one unknown size follows from the others
    return moved


def flat(op: Builder, x: Var) -> Var:
    return op.Reshape(x, [-1])


def total(op: Builder, x: Var) -> Var:
    """Return the number of elements, an int64 scalar."""
    return op.ReduceProd(op.shape(x), keepdims=0)


# --- the same elements in a different shape --------------------------------------------------------------


@vjp(
    "Reshape",
    case(real(2, 3, 4), [4, -1]),
    case(real(2, 3, 4), [0, -1]),
    case(real(2, 3), [3, 1, 2]),
    case(real(0, 3), [3, 0], allowzero=1),
    case(real(0, 3, 4), [0, 12]),
    case(real(1), np.zeros(0, np.int64)),
    case(real(), [1, 1]),
)
def reshape(op: Builder, dy: Var, y: Var, x: Var, shape: Var, **_: int) -> Gradients:
    return (reshaped(op, dy, x),)


@vjp(
    "Flatten",
    case(real(2, 3, 4)),
    case(real(2, 3, 4), axis=0),
    case(real(2, 3, 4), axis=3),
    case(real(2, 3, 4), axis=-1),
    case(real(0, 3, 4), axis=2),
)
def flatten(op: Builder, dy: Var, y: Var, x: Var, **_: int) -> Gradients:
    return (reshaped(op, dy, x),)


@vjp(
    "Squeeze",
    case(real(2, 1, 3, 1)),
    case(real(2, 1, 3, 1), [1]),
    case(real(1, 2, 1), [-1, 0]),
    case(real(1, 0), [0]),
    case(real(1, 1), [0, 1]),
)
def squeeze(op: Builder, dy: Var, y: Var, x: Var, axes: Var | None = None) -> Gradients:
    return (reshaped(op, dy, x) if axes is None else op.Unsqueeze(dy, axes),)


@vjp("Unsqueeze", case(real(2, 3), [0, 2]), case(real(2, 3), [-1, 1]), case(real(), [0]), case(real(0, 2), [1]))
def unsqueeze(op: Builder, dy: Var, y: Var, x: Var, axes: Var) -> Gradients:
    return (op.Squeeze(dy, axes),)


@vjp(
    "Transpose",
    case(real(2, 3, 4)),
    case(real(2, 3, 4), perm=[1, 2, 0]),
    case(real(1, 3, 1, 2), perm=[0, 2, 3, 1]),
    case(real(0, 3), perm=[1, 0]),
    case(real()),
)
def transpose(op: Builder, dy: Var, y: Var, x: Var, *, perm: Sequence[int] | None = None) -> Gradients:
    return (op.Transpose(dy, perm=None if perm is None else np.argsort(perm)),)


@vjp(
    "DepthToSpace",
    case(real(2, 8, 2, 3), blocksize=2, mode="DCR"),
    case(real(2, 8, 2, 3), blocksize=2, mode="CRD"),
    case(real(1, 18, 1, 2), blocksize=3, mode="CRD"),
    case(real(2, 8, 2, 3), blocksize=2),
    case(real(1, 2, 2, 3), blocksize=1, mode="CRD"),
    case(real(1, 4, 2, 0), blocksize=2, mode="CRD"),
)
def depth_to_space(op: Builder, dy: Var, y: Var, x: Var, *, blocksize: int, mode: str = "DCR") -> Gradients:
    if mode == "DCR":
        return (op.SpaceToDepth(dy, blocksize=blocksize),)
    n, c, h, w = (op.dim(x, axis) for axis in range(4))
    blocks = op.Concat(n, op.Div(c, blocksize**2), h, [blocksize], w, [blocksize], axis=0)
    split = op.Reshape(dy, blocks, allowzero=1)
    return (reshaped(op, op.Transpose(split, perm=[0, 1, 3, 5, 2, 4]), x),)


@vjp(
    "SpaceToDepth",
    case(real(2, 3, 4, 6), blocksize=2),
    case(real(1, 2, 3, 6), blocksize=3),
    case(real(1, 2, 1, 3), blocksize=1),
)
def space_to_depth(op: Builder, dy: Var, y: Var, x: Var, *, blocksize: int) -> Gradients:
    return (op.DepthToSpace(dy, blocksize=blocksize, mode="DCR"),)


@vjp(
    "ReverseSequence",
    case(real(3, 4, 2), [2, 4, 1], batch_axis=0, time_axis=1),
    case(real(4, 3), [4, 3, 1], batch_axis=1, time_axis=0),
    case(real(4, 3), [4, 3, 1]),
)
def reverse_sequence(op: Builder, dy: Var, y: Var, x: Var, lengths: Var, **axes: Any) -> Gradients:
    return (op.ReverseSequence(dy, lengths, **axes),)


# --- repeated, masked, accumulated -------------------------------------------------------------------


@vjp(
    "Expand",
    case(real(3, 1), [2, 3, 4]),
    case(real(3), [2, 1]),
    case(real(2, 3), [1]),
    case(real(), [2, 2]),
    case(real(1, 3), [0, 1]),
    case(real(2), np.zeros(0, np.int64)),
    broadcasts=True,
)
def expand(op: Builder, dy: Var, y: Var, x: Var, shape: Var) -> Gradients:
    return (dy,)


@vjp(
    "Tile",
    case(real(2, 3), [2, 1]),
    case(real(1, 2, 3), [3, 1, 2]),
    case(real(2, 3), [1, 1]),
    case(real(2, 3), [0, 2]),
    case(real(0, 3), [2, 2]),
)
def tile(op: Builder, dy: Var, y: Var, x: Var, repeats: Var) -> Gradients:
    size = op.shape(x)
    pairs = op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(size, [1]), axis=1)
    copies = op.Reshape(dy, op.Reshape(pairs, [2 * x.rank]), allowzero=1)  # r0, n0, r1, n1, …
    return (op.ReduceSum(copies, np.arange(0, 2 * x.rank, 2), keepdims=0),)


@vjp(
    "Trilu",
    case(real(3, 4)),
    case(real(2, 4, 3), upper=0),
    case(real(3, 4), -1),
    case(real(3, 4), 1, upper=0),
    case(real(3, 3), 7),
    case(real(3, 3), -7),
    case(real(0, 3)),
)
def trilu(op: Builder, dy: Var, y: Var, x: Var, k: Var | None = None, *, upper: int = 1) -> Gradients:
    return (op.Trilu(dy, k, upper=upper),)


@vjp(
    "CumSum",
    case(real(2, 3, 2), 1),
    case(real(2, 3), -1, exclusive=1),
    case(real(2, 3), 0, reverse=1),
    case(real(3, 2), 0, reverse=1, exclusive=1),
    case(real(2, 1), 1, exclusive=1),
    case(real(0, 3), 0),
)
def cumsum(op: Builder, dy: Var, y: Var, x: Var, axis: Var, *, exclusive: int = 0, reverse: int = 0) -> Gradients:
    return (op.CumSum(dy, axis, exclusive=exclusive, reverse=1 - reverse),)


# --- concatenated and split --------------------------------------------------------------------------


@vjp(
    "Concat",
    case(real(2, 3), real(2, 1), real(2, 2), axis=1),
    case(real(2, 3), real(1, 3), axis=-2),
    case(real(2, 3), axis=0),
    case(real(2, 0), real(2, 3), axis=1),
    case(real(2), [1.0, 2.0], real(1), axis=0),
)
def concat(op: Builder, dy: Var, y: Var, *xs: Var, axis: int) -> Gradients:
    if len(xs) == 1:
        return (dy,)
    sizes = op.Concat(*(op.dim(x, axis) for x in xs), axis=0)
    return all_of(op.Split(dy, sizes, axis=axis, outputs=len(xs)))


@vjp(
    "Split",
    case(real(2, 7), [3, 4], axis=1, outputs=2),
    case(real(2, 7), [3, 0, 4], axis=-1, outputs=3),
    case(real(6, 2), num_outputs=3, outputs=3),
    case(real(7, 2), num_outputs=3, outputs=3),
    case(real(2, 7), [3, 2, 2], axis=1, outputs=3, read=[1]),
    case(real(4, 2), [4], outputs=1),
)
def split(
    op: Builder,
    dys: tuple[Var | None, ...],
    ys: tuple[Var, ...],
    x: Var,
    lengths: Var | None = None,
    *,
    axis: int = 0,
    **_: int,
) -> Gradients:
    parts = [op.zeros_like(y) if dy is None else dy for dy, y in zip(dys, ys, strict=True)]
    return (op.Concat(*parts, axis=axis),)


@vjp("Range", case(uniform(0.1, 0.2), 3.0, uniform(0.5, 0.52)), case(uniform(2.0, 2.1), 0.0, uniform(-0.55, -0.5)))
def range_(op: Builder, dy: Var, y: Var, start: Var, limit: Var, delta: Var) -> Gradients:
    """Return the gradients of ``start``, Σ dy, and of ``delta``, Σ i·dy[i].

    ``limit`` has no gradient, because the number of elements is piecewise constant.
    """
    steps = op.cast(op.Range(0, op.Squeeze(op.dim(dy, 0), [0]), 1), dy.dtype)
    return op.ReduceSum(dy, keepdims=0), None, op.ReduceSum(dy * steps, keepdims=0)


no_gradient("its value does not depend on the input's", "EyeLike")

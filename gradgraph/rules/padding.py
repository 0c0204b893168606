"""The gradient rule of Pad: crop the border of dy (mode "constant"), or add it to the elements it was copied from."""

from __future__ import annotations

import numpy as np

from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.placement import FIRST, LAST, positions, put
from gradgraph.rules.registry import Gradients, case, positive, real, vjp
from gradgraph.rules.shape import reshaped


@vjp(
    "Pad",
    case(real(2, 3), [0, 1, 1, 2]),
    case(real(2, 3), [0, 1, 1, 2], positive()),
    case(real(2, 3), [1, 0, 0, 0], positive(1)),
    case(real(3, 4), [-1, 1, 1, -2], positive()),
    case(real(3, 4), [-1, -1, 0, -2]),
    case(real(2, 3, 4), [1, 2], None, [-1]),
    case(real(2, 3, 4), [1, 0, 2, 1], positive(), [2, 0]),
    case(real(2, 3), [0, 0, 0, 0], positive()),
    case(real(0, 3), [2, 0, 0, 1], positive()),
    case(real(3, 4), [1, 3, 2, 0], mode="reflect"),
    case(real(2, 3, 5), [2, 4], None, [-1], mode="reflect"),
    case(real(3, 4), [-1, 1, 1, -1], mode="reflect"),
    case(real(1, 4), [0, 1, 0, 1], mode="reflect"),
    case(real(3, 4), [0, 0, 2, 1], mode="reflect"),
    case(real(2, 3), [5, 1, 0, 2], mode="edge"),
    case(real(1, 3), [2, 0, 1, 0], mode="edge"),
    case(real(3, 4), [-1, 1, 1, -1], mode="edge"),
    case(real(2, 3), [1, 3, 2, 0], mode="wrap"),
    case(real(2, 3), [5, 1, 0, 4], mode="wrap"),
    case(real(2, 3), [1, 0, 1, 2], mode="wrap"),
    case(real(2, 3), [0, 4, 0, 1], mode="wrap"),  # wraps around more than once
    case(real(3, 4), [1, -1, -1, 1], mode="wrap"),
)
def pad(
    op: Builder,
    dy: Var,
    y: Var,
    x: Var,
    pads: Var,
    value: Var | None = None,
    axes: Var | None = None,
    *,
    mode: str = "constant",
) -> Gradients:
    if mode == "constant":
        return _cut(op, dy, pads, axes), None, _border(op, dy, x, pads, value, axes)
    width = _widths(x, pads, axes)
    if width is None or not all(_folds(mode, x, axis, *ends) for axis, ends in width.items()):
        return (put(op, dy, op.Pad(positions(op, x), pads, None, axes, mode=mode), x, "add"),)
    for axis, (before, after) in width.items():
        dy = _folded(op, dy, op.dim(x, axis), axis, before, after, mode)
    return (dy,)


def _cut(op: Builder, dy: Var, pads: Var, axes: Var | None) -> Var:
    """Return ``dy`` without the border: by a Slice, or if a padding may be negative, by a Pad, which is slower."""
    if pads.const is None or (pads.const < 0).any():
        return op.Pad(dy, -pads, None, axes)
    if not pads.const.any():
        return dy
    before, after = pads.const.reshape(2, -1)
    return op.Slice(dy, before, np.where(after > 0, -after, LAST), axes)


def _border(op: Builder, dy: Var, x: Var, pads: Var, value: Var | None, axes: Var | None) -> Var | None:
    if value is None:
        return None
    border = op.Pad(op.zeros_like(x), pads, op.const(1, x.dtype), axes)  # Σdy - Σdx would lose digits
    return reshaped(op, op.ReduceSum(dy * border, keepdims=0), value)


def _widths(x: Var, pads: Var, axes: Var | None) -> dict[int, tuple[int, int]] | None:
    """Return the padding (before, after) of each padded axis; None if any is negative or only known at run time."""
    if pads.const is None or (axes is not None and axes.const is None) or (pads.const < 0).any():
        return None
    chosen = range(x.rank) if axes is None else [int(a) % x.rank for a in axes.const or ()]
    ends = pads.const.reshape(2, -1).T.tolist()
    return {axis: (before, after) for axis, (before, after) in zip(chosen, ends, strict=True) if before or after}


def _folds(mode: str, x: Var, axis: int, before: int, after: int) -> bool:
    """Whether each border copies one contiguous run of elements, or repeats one element ("edge").

    If the size is unknown, "reflect" is assumed to be narrower than the axis, as onnxruntime and PyTorch require.
    """
    size, widest = x.dim(axis), max(before, after)
    if not isinstance(size, int):
        return mode != "wrap"
    return mode == "edge" or widest < size + (mode == "wrap")


def _folded(op: Builder, dy: Var, size: Var, axis: int, before: int, after: int, mode: str) -> Var:
    """Return the vjp of padding one axis: the inner part of ``dy``, with each border added to its source elements."""

    def placed(start: int, stop: int, step: int, left: Var, right: Var) -> Var:
        run = op.Slice(dy, [start], [stop], [axis], [step])
        part = op.ReduceSum(run, [axis], keepdims=1) if mode == "edge" else run
        return op.Pad(part, op.Concat(left, right, axis=0), None, [axis])

    zero, one, last = op.const([0]), op.const([1]), size - 1
    inner = op.Slice(dy, [before], [-after if after else LAST], [axis])
    if mode == "reflect":
        head = placed(before - 1, FIRST, -1, one, last - before)
        tail = placed(-1, -after - 1, -1, last - after, one)
    else:
        head = placed(0, before, 1, *((zero, last) if mode == "edge" else (size - before, zero)))
        tail = placed(-after, LAST, 1, *((last, zero) if mode == "edge" else (zero, size - after)))
    return op.sum_of([inner] + [head] * bool(before) + [tail] * bool(after))

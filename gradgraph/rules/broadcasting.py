"""Undo broadcasting, for all rules: reduce a gradient with the output's shape to the shape of an input."""

from __future__ import annotations

from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var


def unbroadcast(op: Builder, dx: Var, y: Var, x: Var) -> Var:
    """Return ``dx`` (shaped like ``y``, or already like ``x``) summed over the axes along which ``x`` was broadcast.

    The axes are constants if known sizes or equal symbolic names determine them; otherwise they are computed at run
    time.
    """
    if x.shape is None or y.shape is None:
        return _at_run_time(op, dx, x)
    if dx.value.shape is not None and shapes.is_static(x.shape) and dx.shape == x.shape:
        return dx
    lead = len(y.shape) - len(x.shape)
    pairs = list(zip(y.shape[lead:], x.shape, strict=True))
    if any(a != b and not isinstance(b, int) for a, b in pairs) or any(a is None and b is None for a, b in pairs):
        return _at_run_time(op, dx, x)
    axes = [*range(lead), *(i + lead for i, (a, b) in enumerate(pairs) if b == 1 and a != 1)]
    if not axes:
        return dx
    total = op.ReduceSum(dx, axes, keepdims=int(not lead))
    if len(axes) > lead > 0:  # axes of size 1 in x were removed together with the leading axes: restore them
        total = op.Reshape(total, op.shape(x), allowzero=1)
    return total


def _at_run_time(op: Builder, dx: Var, x: Var) -> Var:
    """Return ``dx`` summed to the shape of ``x``, read at run time: over missing leading axes and axes of size 1."""
    size = op.shape(x)
    missing = op.Sub(op.Shape(op.Shape(dx)), op.Shape(size))
    padded = op.Concat(op.full(missing, 1, size.dtype), size, axis=0)
    axes = op.Reshape(op.NonZero(op.Equal(padded, 1)), [-1])
    summed = op.ReduceSum(dx, axes, keepdims=1, noop_with_empty_axes=1)
    return op.Reshape(summed, size, allowzero=1)

"""The matrix W of one axis for Resize with keep_aspect_ratio_policy.

One scale s couples all axes, so no axis can be resized separately. The scale is not rounded, while the resulting sizes
are. Each output o of an axis has a coordinate c(o) in the input, and W[o, i] is the weight of input i, by its distance
from c(o).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.rounding import wide

INT64 = ir.DataType.INT64
END = 2**63 - 1
_REACH = {"linear": 1, "cubic": 2}  # radius of the kernel's support


def tied_matrix(
    op: Builder, x: Var, y: Var, axis: int, along: Sequence[int], roi: Var | None, sizes: Var, how: dict[str, Any]
) -> Var:
    """Return W[output, input] of ``axis``, in float32 or wider.

    ``along`` lists all resized axes, ``roi`` is None if it is not used, and ``how`` are the attributes of the Resize.
    """
    antialias = how["antialias"]
    if how["mode"] != "cubic" and not antialias:
        return _kernel(op, "linear", _gaps(op, _read_off(op, x, axis, along, roi, sizes, how), _steps(op, x, axis)))
    s = _common_scale(op, x, along, sizes, how)
    shrunk = op.Min(s, 1.0) if antialias else None
    if roi is None:
        return _weights(op, x, axis, _written(op, x, y, axis, s, how), shrunk, how)
    c = _read_off(op, x, axis, along, roi, sizes, how | {"mode": "linear", "antialias": 0, "exclude_outside": 0})
    inside = op.cast(op.Unsqueeze(c, [1]) >= 0.0, c.dtype)
    return _weights(op, x, axis, op.Relu(c), shrunk, how) * inside


def _common_scale(op: Builder, x: Var, along: Sequence[int], sizes: Var, how: dict[str, Any]) -> Var:
    """Return the common scale: the smallest of the axes' scales for the policy "not_larger", else the largest."""
    before = op.Concat(*(op.dim(x, a) for a in along), axis=0)
    scales = op.cast(sizes, _wide(x)) / op.cast(before, _wide(x))
    reduce = op.ReduceMin if how["keep_aspect_ratio_policy"] == "not_larger" else op.ReduceMax
    return reduce(scales, [0], keepdims=0)


# --- coordinates -------------------------------------------------------------------------------------------------


def _read_off(
    op: Builder, x: Var, axis: int, along: Sequence[int], roi: Var | None, sizes: Var, how: dict[str, Any]
) -> Var:
    """Return the input coordinate c(o) of each output o: a Resize of the ramp 0, 1, 2, … by linear interpolation.

    In mode "nearest", c is rounded. It is clamped to the edges, and is -1 outside the region of interest.
    """
    others = [a for a in range(x.rank) if a != axis]
    shape = op.Concat(*(op.dim(x, a) if a in along else op.const([1]) for a in range(x.rank)), axis=0)
    ramp = op.Expand(op.Reshape(_steps(op, x, axis), [-1 if a == axis else 1 for a in range(x.rank)]), shape)
    region = None if roi is None else _region(op, roi, along.index(axis), len(along))
    line = op.Resize(ramp, region, None, sizes, axes=list(along), **{**how, "extrapolation_value": -1.0})
    return op.Reshape(op.Slice(line, [0] * len(others), [1] * len(others), others) if others else line, [-1])


def _region(op: Builder, roi: Var, j: int, count: int) -> Var:
    """Return the region of interest along axis ``j``, with the full range along the other axes."""
    choices = op.Concat(op.Gather(wide(op, roi), [j, j + count]), [0.0, 1.0], axis=0)  # in the ramp's type
    return op.Gather(choices, [k if i == j else k + 2 for k in (0, 1) for i in range(count)])


def _written(op: Builder, x: Var, y: Var, axis: int, s: Var, how: dict[str, Any]) -> Var:
    """Return the input coordinate c(o) of each output o by ONNX's formulas; it may lie beyond the edges."""
    n, count = (op.cast(op.Squeeze(op.dim(v, axis), [0]), _wide(x)) for v in (x, y))
    o = _steps(op, y, axis)
    half = (o + 0.5) / s - 0.5
    match how["coordinate_transformation_mode"]:
        case "asymmetric":
            return o / s
        case "align_corners":
            return o * (n - 1.0) / op.Max(count - 1.0, 1.0)
        case "half_pixel_symmetric":
            return half + n / 2.0 * (1.0 - count / (s * n))
        case "pytorch_half_pixel":
            return op.Where(count > 1.0, half, 0.0)
        case _:
            return half


def _steps(op: Builder, x: Var, axis: int) -> Var:
    """Return the ramp 0, 1, 2, … along ``axis`` of ``x``."""
    return op.cast(op.Range(0, op.Squeeze(op.dim(x, axis), [0]), 1), _wide(x))


def _wide(x: Var) -> ir.DataType:
    """Return the dtype of coordinates: at least float32, because float16 has too few digits for large images."""
    return x.dtype if x.dtype.bitwidth >= 32 else ir.DataType.FLOAT


# --- weights -----------------------------------------------------------------------------------------------------


def _weights(op: Builder, x: Var, axis: int, c: Var, shrunk: Var | None, how: dict[str, Any]) -> Var:
    """Return W for the outputs' coordinates ``c``; with antialias, the kernel is widened by 1 / ``shrunk``.

    The kernel may read pixels beyond an edge, which have the value at the edge; exclude_outside excludes them.
    """
    n, reach = op.dim(x, axis), _REACH[how["mode"]]
    # coordinates are less than 1 beyond the edges
    margin = op.const([reach + 1]) if shrunk is None else op.cast(op.Ceil(reach / op.Reshape(shrunk, [1])), INT64) + 1
    taps = op.Range(op.Squeeze(op.Neg(margin), [0]), op.Squeeze(n + margin, [0]), 1)
    gaps = _gaps(op, c, op.cast(taps, c.dtype))
    w = _kernel(op, how["mode"], gaps if shrunk is None else gaps * shrunk, how["cubic_coeff_a"])
    inside = op.Slice(w, margin, n + margin, [1])
    if how["exclude_outside"]:
        w = inside
    else:
        before, after = (op.Slice(w, a, b, [1]) for a, b in (([0], margin), (n + margin, [END])))
        steps = op.Range(0, op.Squeeze(n, [0]), 1)
        edges = [(before, op.Equal(steps, 0)), (after, op.Equal(steps, n - 1))]
        w = op.Sum(inside, *(op.ReduceSum(v, [1], keepdims=1) * op.cast(edge, c.dtype) for v, edge in edges))
    return w / op.ReduceSum(w, [1], keepdims=1)


def _gaps(op: Builder, c: Var, taps: Var) -> Var:
    """Return the distances c[o] − i of output coordinates from the input indices i in ``taps``: [outputs, taps]."""
    return op.Unsqueeze(c, [1]) - taps


def _kernel(op: Builder, mode: str, gaps: Var, a: float = -0.75) -> Var:
    """Return the weights at the distances ``gaps``: a triangle (linear), or cubic convolution (Keys, 1981)."""
    u = op.Abs(gaps)
    if mode == "linear":
        return op.Relu(1.0 - u)
    near = ((a + 2.0) * u - (a + 3.0)) * u * u + 1.0
    far = ((u - 5.0) * u + 8.0) * u * a - 4.0 * a
    return op.Where(u <= 1.0, near, op.Where(u < 2.0, far, 0.0))

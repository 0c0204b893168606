"""The gradient rule of Resize.

Resize is linear and separable: along each axis it multiplies by a matrix W [outputs, inputs], so dx = Wᵀ dy, axis by
axis. W is computed by applying Resize to the identity matrix rather than from coordinate formulas, so that it has the
rounding of the forward kernel at any run-time size. (If an aspect ratio couples the axes, ``resize_tied`` computes W.)
Scales, sizes and the region of interest determine coordinates and have no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import constant_of
from gradgraph.rules.registry import Case, Gradients, case, point, real, vjp
from gradgraph.rules.resize_tied import tied_matrix

_CENTRED = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel")


def _coordinates(mode: str, **attrs: Any) -> list[Case]:
    """Return test cases with every coordinate transformation, for upsampling and downsampling."""
    modes = (*_CENTRED, "align_corners", "asymmetric")
    return [
        case(real(1, 2, 4, 5), None, None, [1, 2, 7, 3], mode=mode, coordinate_transformation_mode=m, **attrs)
        for m in modes
    ]


def _rounding() -> list[Case]:
    modes = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    return [
        case(real(1, 1, 4, 5), None, None, [1, 1, 7, 3], nearest_mode=n, coordinate_transformation_mode=m)
        for n in modes
        for m in ("half_pixel", "asymmetric")
    ]


def _tied() -> list[Case]:
    """Return test cases with keep_aspect_ratio_policy: kernels that read beyond the edges, then regions of interest."""
    wide: list[dict[str, Any]] = [
        {"mode": "cubic"},
        {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1},
        *({"mode": "cubic", "coordinate_transformation_mode": m} for m in ("half_pixel_symmetric", "asymmetric")),
        *({"mode": m, "antialias": 1, "exclude_outside": e} for m in ("linear", "cubic") for e in (0, 1)),
    ]
    symmetric, far = wide[2:3], [{"mode": "cubic", "antialias": 1}]
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.0}
    cut = [{"mode": m, **crop} for m in ("nearest", "linear", "cubic")] + [{"mode": "cubic", "antialias": 1, **crop}]
    ends = [{"mode": "cubic", "coordinate_transformation_mode": m} for m in ("align_corners", "pytorch_half_pixel")]
    roi = [0.13, -0.35, 0.87, 1.2]
    plans = [
        (wide, None, real(1, 1, 5, 4), [3, 4], [7, 5]),
        (symmetric, None, real(1, 1, 5, 4), [4, 3], [7, 6]),  # the odd size is rounded
        (far, None, real(1, 1, 8, 8), [2, 3], [2, 3]),
        # integers, as the reference implementation does not round these sizes
        (cut, roi, real(1, 1, 6, 4), [3, 4], [9, 5]),
        (cut[2:3], [0.0, 0.0, 0.87, 1.2], real(1, 1, 6, 4), [3, 4], [9, 5]),  # the first output is at the first input
        (ends, None, real(1, 1, 6, 4), [3, 4], [9, 5]),
    ]
    return [
        case(x, region, None, given, axes=[2, 3], keep_aspect_ratio_policy=policy, **how)
        for options, region, x, *sizes in plans
        for policy, given in zip(("not_larger", "not_smaller"), sizes, strict=True)
        for how in options
    ]


@vjp(
    "Resize",
    case(real(1, 2, 3, 2), None, [1.0, 1.0, 2.0, 3.0]),
    case(real(2, 1, 3), None, [1.0, 1.0, 3.0], coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
    case(real(1, 2, 2, 3, 2), None, [1.0, 1.0, 2.0, 1.0, 2.0]),
    case(real(1, 2, 3, 2), None, [1.0, 1.0, 2.0, 2.0], nearest_mode="floor"),
    case(real(2, 3), None, [2.0, 2.0]),
    case(real(4), None, None, [6]),
    case(real(1, 2, 3, 2), None, None, [1, 2, 6, 4]),
    case(real(1, 2, 3, 2), None, None, [1, 2, 3, 2]),
    case(real(1, 1, 2, 2), None, [1.0, 1.0, 0.5, 0.5]),
    case(real(1, 1, 5, 4), None, None, [3, 7], axes=[2, 3]),
    case(
        real(1, 1, 3, 2), None, [1.0, 1.0, 2.0, 3.0], coordinate_transformation_mode="asymmetric", nearest_mode="ceil"
    ),
    case(real(1, 1, 4, 4), None, [1.0, 1.0, 1.5, 1.5]),
    case(real(1, 2, 3, 2), None, [1.0, 2.0, 2.0, 1.0]),
    case(real(1, 2, 3, 2), None, [2.0, 1.0, 2.0, 1.0]),
    case(real(1, 2, 3), None, [1.0, 1.0, 2.0]),
    case(real(1, 2, 3, 2), None, None, [3, 4], axes=[2, 3]),
    case(real(1, 2, 3, 2), None, None, [1, 2, 6], axes=[0, 1, 2]),
    case(real(1, 1, 6, 4), None, None, [1, 1, 3, 2]),
    case(real(1, 1, 2, 1, 1, 2), None, [1.0, 1.0, 2.0, 1.0, 1.0, 3.0]),
    case(real(1, 1, 5, 4), None, None, [3, 7], axes=[3, 2], mode="linear"),
    case(real(2, 3, 2), None, [1.0, 1.0, 2.0], mode="linear"),
    case(real(1, 2, 2, 3, 2), None, [1.0, 1.0, 2.0, 2.0, 1.5], mode="linear"),
    case(real(1, 1, 1, 1), None, [1.0, 1.0, 3.0, 2.0], mode="linear"),
    case(real(1, 3, 4, 2), None, [1.0, 2.0, 0.5, 1.0], mode="linear"),
    case(real(1, 1, 6, 5), None, [1.0, 1.0, 0.5, 0.6], mode="linear", antialias=1),
    case(real(1, 1, 6, 5), None, [1.0, 1.0, 0.5, 2.0], mode="cubic", antialias=1, exclude_outside=1),
    case(real(1, 1, 4, 4), None, [1.0, 1.0, 1.5, 0.5], mode="cubic", cubic_coeff_a=-0.5, exclude_outside=1),
    case(real(4, 4), None, None, [7, 7], keep_aspect_ratio_policy="not_larger", mode="linear"),
    case(real(1, 2, 4, 5), None, None, [7, 7], axes=[2, 3], keep_aspect_ratio_policy="not_larger"),
    case(real(1, 2, 4, 5), None, None, [7, 7], axes=[2, 3], keep_aspect_ratio_policy="not_smaller", mode="linear"),
    *(
        case(
            real(1, 1, 5, 4),
            [0.0, 0.0, 0.1, -0.35, 1.0, 1.0, 0.9, 1.2],
            None,
            [1, 1, 4, 6],
            mode=mode,
            coordinate_transformation_mode="tf_crop_and_resize",
            extrapolation_value=7.0,
        )
        for mode in ("nearest", "linear", "cubic")
    ),
    case(
        real(1, 1, 5, 4),
        [0.1, 0.0, 0.9, 1.0],
        None,
        [5, 6],
        axes=[2, 3],
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
        onnxruntime="does not crop along an axis that keeps its size",
    ),
    case(real(5, 4), [0.1, 0.7], [1.6], axes=[0], coordinate_transformation_mode="tf_crop_and_resize", mode="linear"),
    *_tied(),
    point(  # the single output is at the first input; in the reference implementation, half a pixel before it
        [[1.0, 2.0], [3.0, 4.0]],
        None,
        None,
        [1, 1],
        gives=[[[1.0, 0.0], [0.0, 0.0]], None, None, None],
        keep_aspect_ratio_policy="not_larger",
        mode="cubic",
        coordinate_transformation_mode="pytorch_half_pixel",
    ),
    *_rounding(),
    *_coordinates("linear"),
    *_coordinates("cubic"),
    settings=[1, 2],  # the region of interest and the scales
)
def resize(
    op: Builder,
    dy: Var,
    y: Var,
    x: Var,
    roi: Var | None = None,
    scales: Var | None = None,
    sizes: Var | None = None,
    *,
    axes: Sequence[int] | None = None,
    keep_aspect_ratio_policy: str = "stretch",
    **how: Any,
) -> Gradients:
    along = [a % x.rank for a in axes] if axes else list(range(x.rank))
    scales, sizes = _given(scales), _given(sizes)
    roi = roi if how.get("coordinate_transformation_mode") == "tf_crop_and_resize" else None
    copied = _copied(x, sizes)
    tied = sizes is not None and keep_aspect_ratio_policy != "stretch"
    factors = None if tied else _repeats(x, y, along, scales, how)
    if factors is not None:
        count = float(np.prod(factors))  # for sums of blocks, AveragePool is twice as fast as ReduceSum in 6 axes
        return (dy if count == 1.0 else op.AveragePool(dy, kernel_shape=factors, strides=factors) * count,)
    for axis, j in sorted(zip(along, range(len(along)), strict=True), reverse=True):
        if sizes is not None and tied:
            policy = {"keep_aspect_ratio_policy": keep_aspect_ratio_policy}
            w = op.cast(tied_matrix(op, x, y, axis, along, roi, sizes, how | policy), x.dtype)
        elif _stays(x, y, axis, j, scales, roi) or axis in copied:
            continue
        else:
            region = _entries(op, roi, [j, j + len(along)])
            w = _matrix(op, x, axis, region, _entries(op, scales, [j]), None if sizes is None else op.dim(y, axis), how)
        dy = _contracted(op, dy, w, x, y, axis)
    return (dy,)


def _given(x: Var | None) -> Var | None:
    """Return ``x``, or None if it is empty: old exporters write an empty tensor for an absent input."""
    return None if x is None or (x.const is not None and x.const.size == 0) else x


def _entries(op: Builder, x: Var | None, where: list[int]) -> Var | None:
    if x is None:
        return None
    return op.Gather(x, where) if x.const is None else op.const(x.const[where])


def _stays(x: Var, y: Var, axis: int, j: int, scales: Var | None, roi: Var | None) -> bool:
    """Whether Resize is known to keep elements in place along the axis; a scale of 1.1 may move them at equal size."""
    if roi is not None:
        return False
    if scales is not None:
        return scales.const is not None and scales.const[j] == 1.0
    return x.shape is not None and y.shape is not None and x.shape[axis] is not None and x.shape[axis] == y.shape[axis]


def _copied(x: Var, sizes: Var | None) -> set[int]:
    """Return the axes whose entries in ``sizes``, computed by Where(other axes, …, Shape(x)), are copied from ``x``."""
    where = None if sizes is None else sizes.value.producer()
    shape = where.inputs[2].producer() if where is not None and where.op_type == "Where" and where.inputs[2] else None
    if where is None or shape is None or shape.op_type != "Shape" or shape.inputs[0] is not x.value:
        return set()
    others = constant_of(where.inputs[0])
    return set() if others is None else set(np.flatnonzero(~others).tolist())


# --- nearest with an integer factor: blocks of copies ------------------------------------------------


def _repeats(x: Var, y: Var, along: list[int], scales: Var | None, how: dict[str, Any]) -> list[int] | None:
    """Return the repetitions of each element per spatial axis; None if Resize interpolates or drops elements."""
    centre = how.get("coordinate_transformation_mode", "half_pixel")
    rounding = how.get("nearest_mode", "round_prefer_floor")
    blocks = (centre == "asymmetric" and rounding == "floor") or (centre in _CENTRED and rounding.startswith("round"))
    if how.get("mode", "nearest") != "nearest" or not blocks or not 3 <= x.rank <= 5:
        return None
    ratios = [1.0] * x.rank
    for j, axis in enumerate(along):
        ratios[axis] = _ratio(x, y, axis, None if scales is None else (scales, j))
    whole = all(r >= 1 and r == int(r) for r in ratios) and ratios[:2] == [1, 1]
    return [int(r) for r in ratios[2:]] if whole else None


def _ratio(x: Var, y: Var, axis: int, scale: tuple[Var, int] | None) -> float:
    """Return the output size divided by the input size; 0 if it is only known at run time."""
    if scale is not None:
        return 0.0 if scale[0].const is None else float(scale[0].const[scale[1]])
    before, after = (None if v.shape is None else v.shape[axis] for v in (x, y))
    if before is not None and before == after:
        return 1.0
    return after / before if isinstance(before, int) and isinstance(after, int) and before else 0.0


# --- the matrix of one axis --------------------------------------------------------------------------


def _matrix(
    op: Builder, x: Var, axis: int, roi: Var | None, scale: Var | None, size: Var | None, how: dict[str, Any]
) -> Var:
    """Return W[output, input]: the identity matrix resized along its first axis, zero outside a region of interest."""
    n = op.dim(x, axis)
    identity = op.EyeLike(op.full(op.Concat(n, n, axis=0), 0, ir.DataType.FLOAT), dtype=int(ir.DataType.FLOAT))
    return op.Resize(op.cast(identity, x.dtype), roi, scale, size, axes=[0], **{**how, "extrapolation_value": 0.0})


def _contracted(op: Builder, dy: Var, w: Var, x: Var, y: Var, axis: int) -> Var:
    """Return Σₒ dy[…, o, …] W[o, i] by a matrix product, with the axes after ``axis`` (already contracted) merged."""
    if axis == x.rank - 1:
        return dy @ w
    turned = op.Transpose(w, perm=[1, 0])
    if axis == x.rank - 2:
        return turned @ dy
    before, after = op.dims(y, 0, axis), op.dims(x, axis + 1, x.rank)
    rows = op.Concat(before, op.dim(y, axis), op.ReduceProd(after, keepdims=1), axis=0)
    dx = turned @ op.Reshape(dy, rows, allowzero=1)
    return op.Reshape(dx, op.Concat(before, op.dim(x, axis), after, axis=0), allowzero=1)

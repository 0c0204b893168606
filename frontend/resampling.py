"""Padding, interpolation and pixel shuffling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradgraph.errors import ModelError
from gradgraph.frontend.convolution import Spatial, per_axis
from gradgraph.frontend.dims import Extent, floor_divide
from gradgraph.frontend.trace import TensorLike, current, op, tensor

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["interpolate", "pad", "pixel_shuffle", "pixel_unshuffle", "upsample"]

PAD_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def pad(x: TensorLike, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    """``x`` with padding: ``pad`` lists (before, after), from the last dimension backwards; negative numbers crop."""
    x = tensor(x)
    if mode not in PAD_MODES:
        raise ModelError(f"pad has no mode {mode!r}; use one of {', '.join(PAD_MODES)}")
    if len(pad) % 2 or len(pad) > 2 * x.ndim:
        raise ModelError(f"pad is {tuple(pad)}, but must contain two numbers for each of at most {x.ndim} dimensions")
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    if mode != "constant" and any(p < 0 for p in pad):
        raise ModelError(f"pad {tuple(pad)} crops, which mode {mode!r} does not support; slice the tensor instead")
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    if not any(map(any, pairs)):
        return x
    amounts = [b for b, _ in pairs] + [e for _, e in pairs]
    fill = [tensor(value, x.dtype)] if mode == "constant" else []
    dims = [n + (b + e) for n, (b, e) in zip(x.shape, pairs, strict=True)]
    return op.Pad(x, amounts, *fill, mode=PAD_MODES[mode], shape=dims)


# --- interpolation -------------------------------------------------------------------------------

RESIZE: dict[str, dict[str, Any]] = {
    "nearest": {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    "nearest-exact": {
        "mode": "nearest",
        "coordinate_transformation_mode": "half_pixel",
        "nearest_mode": "round_prefer_ceil",
    },
    "linear": {"mode": "linear", "coordinate_transformation_mode": "half_pixel"},
    "bilinear": {"mode": "linear", "coordinate_transformation_mode": "half_pixel"},
    "trilinear": {"mode": "linear", "coordinate_transformation_mode": "half_pixel"},
    "bicubic": {"mode": "cubic", "coordinate_transformation_mode": "half_pixel", "cubic_coeff_a": -0.75},
}
RANKS = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}


def interpolate(
    x: TensorLike,
    size: Spatial | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> Tensor:
    """``x`` ``[N, C, *spatial]`` resized to ``size`` or by ``scale_factor``.

    Modes: nearest, nearest-exact, linear (3-D input), bilinear and bicubic (4-D), trilinear (5-D).
    """
    x = tensor(x)
    rank = x.ndim - 2
    if mode not in RESIZE or RANKS.get(mode, rank) != rank:
        raise ModelError(
            f"interpolate mode {mode!r} does not fit an input of shape {x.shape}; use one of {', '.join(RESIZE)}"
        )
    if align_corners is not None and mode not in RANKS:
        raise ModelError(f"align_corners does not apply to mode {mode!r}; remove it")
    options = dict(RESIZE[mode])
    if align_corners:
        options["coordinate_transformation_mode"] = "align_corners"
    if (size is None) == (scale_factor is None):
        raise ModelError("interpolate takes either size or scale_factor; pass exactly one of them")
    if size is not None:
        sizes, axes = per_axis(size, rank, "size"), list(range(2, x.ndim))
        return op.Resize(x, None, None, current().sizes(sizes), axes=axes, shape=[*x.shape[:2], *sizes], **options)
    factors = (
        [float(scale_factor)] * rank
        if isinstance(scale_factor, int | float | np.number)
        else [float(f) for f in scale_factor or ()]
    )
    if len(factors) != rank:
        raise ModelError(
            f"scale_factor is {tuple(factors)}, but must be one number, or {rank} numbers, one per spatial dimension"
        )
    scaled: list[Extent] = []
    for n, factor in zip(x.shape[2:], factors, strict=True):
        above, below = factor.as_integer_ratio()
        scaled.append(math.floor(n * factor) if isinstance(n, int) else floor_divide(n * above, below))
    scales = np.array([1.0, 1.0, *factors], np.float32)
    return op.Resize(x, None, scales, shape=[*x.shape[:2], *scaled], **options)


upsample = interpolate  # its older name in PyTorch


def pixel_shuffle(x: TensorLike, upscale_factor: int) -> Tensor:
    """``x`` ``[N, C·r², H, W]`` rearranged to ``[N, C, H·r, W·r]``."""
    x, r = tensor(x), upscale_factor
    n, c, h, w = x.shape
    return op.DepthToSpace(x, blocksize=r, mode="CRD", shape=[n, floor_divide(c, r * r), h * r, w * r])


def pixel_unshuffle(x: TensorLike, downscale_factor: int) -> Tensor:
    """``x`` ``[N, C, H·r, W·r]`` rearranged to ``[N, C·r², H, W]``: the inverse of ``pixel_shuffle``."""
    x, r = tensor(x), downscale_factor
    n, c, h, w = x.shape
    h, w = floor_divide(h, r), floor_divide(w, r)
    return x.reshape(n, c, h, r, w, r).permute(0, 1, 3, 5, 2, 4).reshape(n, c * r * r, h, w)

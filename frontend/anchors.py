"""Reference boxes and points of detectors: the anchors of RetinaNet, the priors of SSD, the points of FCOS."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gradgraph.arguments import WHOLE
from gradgraph.errors import BuildError

Array = np.ndarray[Any, Any]
STRIDES = (8, 16, 32, 64, 128)
SCALES = (1.0, 2 ** (1 / 3), 2 ** (2 / 3))
RATIOS = (0.5, 1.0, 2.0)


def anchors(
    image_size: Sequence[int],
    strides: Sequence[int] = STRIDES,
    size: float = 4.0,
    scales: Sequence[float] = SCALES,
    ratios: Sequence[float] = RATIOS,
) -> Array:
    """Return anchor boxes around the cells of feature maps (Lin et al. 2017): float64 ``[A, 4]``.

    Each box is (centre x, centre y, width, height) relative to the image. Boxes are ordered by map, as in ``strides``,
    then by row, by cell, by ratio (height over width), and by scale.

    Args:
        image_size: the height and width of the model's input image.
        strides: for each map, the distance between adjacent cells in pixels; a map has ⌈side / stride⌉ cells along each
            side of the image.
        size: the side of a square anchor of scale 1, in strides: 4 · 8 = 32 pixels on the finest map.
        scales, ratios: the scales and the ratios of height over width. A cell has an anchor for each scale and ratio,
            with the area of a square of side ``size · scale · stride``.
    """
    height, width = image_size
    grown = np.repeat(1 / np.sqrt(np.asarray(ratios, float)), len(scales)) * np.tile(scales, len(ratios))
    shrunk = np.repeat(np.sqrt(np.asarray(ratios, float)), len(scales)) * np.tile(scales, len(ratios))
    found = []
    for stride, centres in zip(strides, _grids(image_size, strides), strict=True):
        sides = np.stack([grown, shrunk], 1) * size * stride
        each = np.broadcast_to(centres[:, None], (len(centres), len(sides), 2))
        found.append(np.concatenate([each, np.broadcast_to(sides, each.shape)], 2).reshape(-1, 4))
    made: Array = np.concatenate(found) / np.array([width, height, width, height])
    return made


def points(image_size: Sequence[int], strides: Sequence[int] = STRIDES) -> Array:
    """Return the centres of the cells of feature maps (Tian et al. 2019): float64 ``[P, 3]`` with rows (x, y, stride)
    in pixels.

    Points are ordered by map, as in ``strides``, then row by row.
    """
    grids = zip(strides, _grids(image_size, strides), strict=True)
    return np.concatenate([np.insert(centres, 2, stride, axis=1) for stride, centres in grids])


def _grids(image_size: Sequence[int], strides: Sequence[int]) -> Iterator[Array]:
    for stride in strides:
        y, x = (np.arange(-(-side // stride)) * stride + stride / 2 for side in image_size)
        yield np.stack(np.meshgrid(x, y), -1).reshape(-1, 2)


def checked_size(name: str, given: Any) -> tuple[int, int]:
    """Return ``given``, the option ``image_size`` of the loss ``name``, as (height, width).

    Raises:
        BuildError: unless ``given`` is two whole numbers above zero.
    """
    sides = given if isinstance(given, list | tuple) else ()
    if len(sides) != 2 or not all(WHOLE.fits(side) and side > 0 for side in sides):
        raise BuildError(
            f"the loss {name} requires the height and width of the image as image_size",
            remedy=f"pass the size of the model's input: gradgraph.losses.{name}(image_size=(480, 640))",
            shell=f"pass the size of the model's input: --loss '{name}(image_size=[480, 640])'",
        )
    return sides[0], sides[1]


def checked_priors(given: Any) -> Array:
    """Return the priors of SSD as an array ``[A, 4]``; raise BuildError if they are missing or invalid."""
    if given is None:
        raise BuildError(
            "the loss ssd requires the prior boxes of the model",
            remedy="pass the array [A, 4] that the model was trained with: gradgraph.losses.ssd(priors)",
            shell="pass the priors that the model was trained with: --loss 'ssd(priors=[[0.5, 0.5, 0.2, 0.2], …])'",
        )
    try:
        laid = np.asarray(given, float)
    except (TypeError, ValueError):  # text, or rows of unequal lengths
        laid = np.empty(0)
    if laid.shape[1:] != (4,) or not np.isfinite(laid).all() or not (laid[:, 2:] > 0).all():
        raise BuildError(
            "the priors of ssd must be an array [A, 4]: centre x, centre y, width and height relative to the image, "
            "with widths and heights above zero"
        )
    return laid

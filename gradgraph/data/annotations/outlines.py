"""Object outlines in COCO's formats, polygons and run lengths, and their pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gradgraph.data.arrays.batch import Array
from gradgraph.errors import DataError
from gradgraph.files.untrusted.documents import Fields
from gradgraph.files.untrusted.regular import UnreadableError

MOST_PIXELS = 64_000_000  # of a mask
FINER = 5.0  # grid points per pixel and axis of the grid on which polygons are drawn
MOST_STEPS = 1 << 22  # maximum number of grid points along an outline
Polygons = list[Array]  # the corners of each polygon: [n, 2], x and y, in pixels or relative to the image size


class Runs(NamedTuple):
    """A run-length mask of height × width pixels in column order: lengths of runs alternating outside and inside."""

    size: tuple[int, int]
    runs: Array

    def mask(self) -> Array:
        """Return the pixels inside: bool ``[height, width]``."""
        inside = np.repeat(np.arange(len(self.runs)) % 2 == 1, self.runs)
        mask: Array = inside.reshape(self.size[1], self.size[0]).T
        return mask


def outline_of(value: Any, what: str) -> Polygons | Runs:
    """Parse the outline of an object: polygons, or the runs of its mask.

    Raises:
        UnreadableError: the value is neither polygons (lists of x, y, x, y, …) nor run lengths.
    """
    if isinstance(value, list):
        return [_polygon(part, what) for part in value]
    fields = Fields(value, what)
    height, width = (*fields.wholes("size"), 0, 0)[:2]
    if not 0 < height * width <= MOST_PIXELS:
        raise UnreadableError(f"{what} has the size {height} × {width}, which is empty or above {MOST_PIXELS:,} pixels")
    given = fields.value("counts")
    runs = _unpacked(given, what) if isinstance(given, str) else np.array(fields.wholes("counts"), np.int64)
    if runs.sum() != height * width:
        raise UnreadableError(f"the runs of {what} have {runs.sum()} pixels, but its size is {height * width}")
    return Runs((height, width), runs)


def _polygon(part: Any, what: str) -> Array:
    if not isinstance(part, list) or len(part) % 2 or not all(type(n) in (int, float) for n in part):
        raise UnreadableError(f"a polygon of {what} is not a list of x, y, x, y, …")
    corners = np.array(part, np.float64).reshape(-1, 2)
    if not np.isfinite(corners).all() or (abs(corners) > 1e9).any():
        raise UnreadableError(f"a polygon of {what} has invalid coordinates")
    return corners


def _unpacked(text: str, what: str) -> Array:
    """Decode the run lengths of pycocotools.

    Each character encodes 6 bits as an offset from '0': 5 bits of a number, lowest first, and whether more follow. From
    the fourth number on, each is the difference from the run before the previous one.
    """
    runs: list[int] = []
    value = shift = 0
    for char in text:
        bits = ord(char) - 48
        if not 0 <= bits < 64 or shift > 35:
            raise UnreadableError(f"the run lengths of {what} are damaged")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    if shift or any(run < 0 for run in runs) or sum(runs) > MOST_PIXELS:
        raise UnreadableError(f"the run lengths of {what} are damaged")
    return np.array(runs, np.int64)


def drawn(polygons: Sequence[Array], size: tuple[int, int]) -> Array:
    """Return the pixels within polygons: bool ``[height, width]``, identical to ``pycocotools``.

    Args:
        polygons: the corners of each polygon, ``[n, 2]``. They are united; within each, the even-odd rule applies.
        size: the width and height of the image.

    Raises:
        DataError: an outline is too long for an image.
    """
    made = np.zeros(size[::-1], bool)
    for corners in polygons:
        if len(corners) > 2:
            made |= _filled(corners, size)
    return made


def _filled(corners: Array, size: tuple[int, int]) -> Array:
    """Return the pixels of one polygon, as ``rleFrPoly`` of pycocotools does.

    The boundary is a chain of points on a grid five times finer than pixels. Where it crosses the centre line of a
    column of pixels, inside and outside are swapped from there downwards.
    """
    width, height = size
    from_, to = _on_fine_grid(np.trunc(FINER * corners + 0.5).astype(np.int64))
    crossing = from_[:, 0] != to[:, 0]
    from_, to = from_[crossing], to[crossing]
    x = (np.minimum(from_[:, 0], to[:, 0]) + 0.5) / FINER - 0.5
    y = np.ceil(np.clip((np.minimum(from_[:, 1], to[:, 1]) + 0.5) / FINER - 0.5, 0, height))
    inside = (np.floor(x) == x) & (x >= 0) & (x <= width - 1)
    changes = np.bincount((x * height + y)[inside].astype(np.int64), minlength=width * height)[: width * height]
    filled: Array = (np.cumsum(changes) % 2 == 1).reshape(width, height).T
    return filled


def _on_fine_grid(corners: Array) -> tuple[Array, Array]:
    """Return the boundary points of a polygon on the fine grid, and the next point after each, ``[points, 2]``.

    ``corners`` are the polygon's corners on that grid, integers ``[n, 2]``.
    """
    ends = np.roll(corners, -1, 0)
    steps = np.abs(ends - corners)
    steep = steps[:, 0] < steps[:, 1]
    count = np.maximum(steps[:, 0], steps[:, 1])
    if count.sum() > MOST_STEPS:
        raise DataError(
            f"an outline is {count.sum() / FINER:,.0f} pixels long, more than {MOST_STEPS / FINER:,.0f}; simplify or "
            "remove it"
        )
    backwards = np.where(steep, corners[:, 1] > ends[:, 1], corners[:, 0] > ends[:, 0])
    first = np.where(backwards[:, None], ends, corners)
    rise = np.where(backwards[:, None], corners, ends) - first
    slope = np.where(steep, rise[:, 0], rise[:, 1]) / np.maximum(count, 1)
    edge = np.repeat(np.arange(len(corners)), count + 1)
    along = np.arange(len(edge)) - np.repeat(np.cumsum(count + 1) - count - 1, count + 1)
    along = np.where(backwards[edge], count[edge] - along, along)
    # rounded towards zero, also for negative numbers
    x = np.where(steep[edge], np.trunc(first[edge, 0] + slope[edge] * along + 0.5), first[edge, 0] + along)
    y = np.where(steep[edge], first[edge, 1] + along, np.trunc(first[edge, 1] + slope[edge] * along + 0.5))
    points = np.stack([x, y], 1)
    return points[:-1], points[1:]

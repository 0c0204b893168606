"""Where an object lies in a picture: polygons and run lengths, as COCO writes them, and their pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gradgraph.files.untrusted.documents import Fields
from gradgraph.files.untrusted.regular import UnreadableError
from gradgraph.runtime.data.batch import Array

MOST_PIXELS = 64_000_000
Polygons = list[Array]  # of each the corners [n, 2], x and y, in pixels


class Runs(NamedTuple):
    """A mask of height × width pixels, column by column: how many are outside, then inside, then outside, …"""

    size: tuple[int, int]
    runs: Array

    def mask(self) -> Array:
        """The pixels inside: bool ``[height, width]``."""
        inside = np.repeat(np.arange(len(self.runs)) % 2 == 1, self.runs)
        mask: Array = inside.reshape(self.size[1], self.size[0]).T
        return mask


def outline_of(value: Any, what: str) -> Polygons | Runs:
    """The polygons of an object, or the runs of its mask.

    Raises:
        UnreadableError: it is neither polygons (lists of x, y, x, y, …) nor run lengths.
    """
    if isinstance(value, list):
        return [_polygon(part, what) for part in value]
    fields = Fields(value, what)
    height, width = (*fields.wholes("size"), 0, 0)[:2]
    if not 0 < height * width <= MOST_PIXELS:
        raise UnreadableError(f"{what} has the size {height} × {width}")
    given = fields.value("counts")
    runs = _unpacked(given, what) if isinstance(given, str) else np.array(fields.wholes("counts"), np.int64)
    if runs.sum() != height * width:
        raise UnreadableError(f"the runs of {what} have {runs.sum()} pixels, and its size {height * width}")
    return Runs((height, width), runs)


def _polygon(part: Any, what: str) -> Array:
    if not isinstance(part, list) or len(part) % 2 or not all(type(n) in (int, float) for n in part):
        raise UnreadableError(f"a polygon of {what} is no list of x, y, x, y, …")
    corners = np.array(part, np.float64).reshape(-1, 2)
    if not np.isfinite(corners).all() or (abs(corners) > 1e9).any():
        raise UnreadableError(f"a polygon of {what} lies nowhere")
    return corners


def _unpacked(text: str, what: str) -> Array:
    """Run lengths of pycocotools: 6 bits in each character from '0' on, the lowest first; from the third run on, what
    is added to the last but one.
    """
    runs: list[int] = []
    value = shift = 0
    for char in text:
        bits = ord(char) - 48
        if not 0 <= bits < 64 or shift > 35:
            raise UnreadableError(f"the runs of {what} are damaged")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    if shift or any(run < 0 for run in runs) or sum(runs) > MOST_PIXELS:
        raise UnreadableError(f"the runs of {what} are damaged")
    return np.array(runs, np.int64)


def drawn(polygons: Sequence[Array], size: tuple[int, int]) -> Any:
    """A picture of Pillow of this (width, height): 1 within the polygons, else 0."""
    from PIL import Image, ImageDraw

    made = Image.new("L", size)
    pen = ImageDraw.Draw(made)
    for corners in polygons:
        if len(corners) > 2:
            pen.polygon([(float(x) - 0.5, float(y) - 0.5) for x, y in corners], fill=1)
    return made

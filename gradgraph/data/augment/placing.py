"""Placement of an image in the model's input: resizing, padding, zoom and flip, applied to boxes and masks, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradgraph.data.augment.augmentation import RANGE, Array, Augmentation, Generator, augmentation

GREY = 114  # padding value, as in YOLO
BILINEAR, NEAREST = 2, 0  # Pillow's constants


@dataclass(frozen=True)
class Placing:
    """A mapping from a region of an image, the window, to a region of the model's input, the field.

    Attributes:
        window: left, top, right, bottom in pixels of the image.
        field: left, top, right, bottom in whole pixels of the input. The rest of the input is padding.
        size: width and height of the input.
        mirrored: whether the result is flipped horizontally.
    """

    window: tuple[float, float, float, float]
    field: tuple[int, int, int, int]
    size: tuple[int, int]
    mirrored: bool = False

    @property
    def covered(self) -> tuple[int, int, int, int]:
        """The region of the model's input that the image covers: left, top, right, bottom, after any mirroring."""
        left, top, right, bottom = self.field
        return (self.size[0] - right, top, self.size[0] - left, bottom) if self.mirrored else self.field

    def picture(self, image: Any, fill: Any = GREY, how: int = BILINEAR) -> Any:
        """Return the placed Pillow image, padded with ``fill``; ``how`` is Pillow's resampling filter."""
        from PIL import Image

        left, top, right, bottom = self.field
        inner = (right - left, bottom - top)
        if self.window != (0, 0, *image.size) or inner != image.size:
            image = image.resize(inner, how, box=self.window)
        if inner != self.size:
            colour = fill if len(image.getbands()) == 1 else tuple([fill] * len(image.getbands()))
            canvas = Image.new(image.mode, self.size, colour)
            canvas.paste(image, (left, top))
            image = canvas
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if self.mirrored else image

    def points(self, xy: Array) -> Array:
        """Map points ``[…, 2]``, x and y, to pixels of the input."""
        first, last = np.array(self.window[:2]), np.array(self.window[2:])
        corner, end = np.array(self.field[:2]), np.array(self.field[2:])
        placed: Array = corner + (xy - first) * (end - corner) / (last - first)
        if self.mirrored:
            placed = np.stack([self.size[0] - placed[..., 0], placed[..., 1]], -1)
        return placed

    def back(self, xyxy: Array) -> Array:
        """Map boxes from pixels of the input back to pixels of the image, for a placement that is not mirrored."""
        first, corner = np.array([*self.window[:2]] * 2), np.array([*self.field[:2]] * 2)
        sides, inner = (np.array([x[2] - x[0], x[3] - x[1]] * 2) for x in (self.window, self.field))
        placed: Array = first + (xyxy - corner) * sides / inner
        return placed

    def boxes(self, xyxy: Array) -> Array:
        """Map boxes ``[n, 4]``, left, top, right, bottom, to pixels of the input, without clipping."""
        corners = self.points(xyxy.reshape(-1, 2, 2))
        return np.concatenate([corners.min(1), corners.max(1)], 1)

    def clipped(self, xyxy: Array) -> Array:
        """Clip boxes, in pixels of the input, to the region that the image covers."""
        low, high = np.array(self.covered[:2] * 2), np.array(self.covered[2:] * 2)
        inside: Array = np.clip(xyxy, low, high)
        return inside


def whole(source: tuple[int, int], size: tuple[int, int], letterbox: bool) -> Placing:
    """Return the placement of a whole image of size ``source``, stretched to the model's input ``size`` or letterboxed.

    Sizes are (width, height). With ``letterbox``, the aspect ratio is kept, and the rest padded.
    """
    field = _letterboxed(source, size) if letterbox else (0, 0, *size)
    return Placing((0.0, 0.0, float(source[0]), float(source[1])), field, size)


def _letterboxed(source: Sequence[float], size: tuple[int, int]) -> tuple[int, int, int, int]:
    scale = min(size[0] / source[0], size[1] / source[1])
    width, height = (max(1, min(most, round(side * scale))) for side, most in zip(source, size, strict=True))
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return left, top, left + width, top + height


def at_random(
    source: tuple[int, int], size: tuple[int, int], letterbox: bool, flip: float, zoom: Sequence[float] | None,
    rng: Generator,
) -> Placing:  # fmt: skip
    """Draw a random placement: flipped with probability ``flip``, and scaled by a factor in the range ``zoom``."""
    mirrored = bool(rng.random() < flip)
    plain = whole(source, size, letterbox)
    if zoom is not None:
        factor, x, y = float(np.exp(rng.uniform(*np.log(zoom)))), *rng.random(2)
        if factor >= 1:
            sides = [side / factor for side in source]
            left, top = x * (source[0] - sides[0]), y * (source[1] - sides[1])
            plain = Placing((left, top, left + sides[0], top + sides[1]), plain.field, size)
        else:
            left, top, right, bottom = plain.field
            width, height = (max(1, round(side * factor)) for side in (right - left, bottom - top))
            left, top = round(x * (size[0] - width)), round(y * (size[1] - height))
            plain = Placing(plain.window, (left, top, left + width, top + height), size)
    return Placing(plain.window, plain.field, size, mirrored)


@augmentation(factor=RANGE)
def zoom(factor: Sequence[float] = (0.7, 1.4)) -> Augmentation:
    """Zoom in by a factor above 1, which crops, or zoom out and pad with grey (114).

    Args:
        factor: the range of the factor, drawn log-uniformly.
    """

    def zoomed(image: Any, rng: Generator) -> Any:
        return at_random(image.size, image.size, False, 0.0, factor, rng).picture(image)

    return Augmentation("sized", zoomed)

"""Geometric augmentations: flips, crops, rotations and affine maps, as in torchvision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradgraph.arguments import NUMBER, NUMBERS, WHOLE, Kind
from gradgraph.data.augment.augmentation import (
    INTERPOLATION,
    INTERPOLATIONS,
    PROBABILITY,
    RANGE,
    Augmentation,
    Generator,
    Size,
    augmentation,
)
from gradgraph.errors import DataError

TRIES = 10  # attempts to find a region before falling back to the centre
_LEFT_RIGHT, _TOP_BOTTOM, _AFFINE = 0, 1, 0  # Pillow's constants
_PADDINGS = ("constant", "edge", "reflect", "symmetric")
ANGLES = Kind("degrees of at least 0, or a range of degrees", lambda value: _is_around_zero(value))
BYTE = Kind("a number from 0 to 255", lambda value: NUMBER.fits(value) and 0 <= value <= 255)
SHARES = Kind("two numbers from 0 to 1",
              lambda value: NUMBERS.fits(value) and len(value) == 2 and all(map(PROBABILITY.fits, value)))  # fmt: skip


def _is_around_zero(value: Any) -> bool:
    if NUMBER.fits(value):
        return bool(0 <= value < math.inf)
    return NUMBERS.fits(value) and len(value) == 2 and bool(value[0] <= value[1])


def span(value: Any, middle: float = 0.0, least: float = -math.inf) -> tuple[float, float]:
    """Return the range (low, high) of an option that is a pair, or a number around ``middle`` (``middle`` ± number)."""
    if NUMBER.fits(value):
        return max(least, middle - float(value)), middle + float(value)
    low, high = value
    return float(low), float(high)


@augmentation(p=PROBABILITY)
def flip(p: float = 0.5) -> Augmentation:
    """Flip horizontally with probability ``p`` (``torchvision.transforms.RandomHorizontalFlip``)."""
    return Augmentation("sized", lambda image, rng: image.transpose(_LEFT_RIGHT) if rng.random() < p else image)


@augmentation(p=PROBABILITY)
def vertical_flip(p: float = 0.5) -> Augmentation:
    """Flip vertically with probability ``p`` (``torchvision.transforms.RandomVerticalFlip``)."""
    return Augmentation("sized", lambda image, rng: image.transpose(_TOP_BOTTOM) if rng.random() < p else image)


@augmentation(scale=RANGE, ratio=RANGE, interpolation=INTERPOLATION)
def random_resized_crop(
    scale: Sequence[float] = (0.08, 1.0),
    ratio: Sequence[float] = (3 / 4, 4 / 3),
    interpolation: str = "bilinear",
) -> Augmentation:
    """Crop a random region and resize it to the model's size (``torchvision.transforms.RandomResizedCrop``).

    Args:
        scale: the range of the fraction of the area.
        ratio: the range of width / height, drawn log-uniformly.
        interpolation: Pillow's name of the resampling filter.
    """

    def cut(image: Any, rng: Generator, size: Size | None) -> Any:
        if size is None:
            raise DataError(
                "random_resized_crop resizes to the model's image size, which is dynamic; set it",
                remedy="pass the size, as image_folder(path, size=(224, 224))",
                shell="add the size with --image, as size=[224,224]",
            )
        left, top, width, height = part_of(image.width, image.height, scale, ratio, rng)
        part = image.crop((left, top, left + width, top + height))
        return part.resize((size[1], size[0]), INTERPOLATIONS[interpolation])

    return Augmentation("stored", cut)


def part_of(
    width: int, height: int, scale: Sequence[float], ratio: Sequence[float], rng: Generator
) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a random region, like ``RandomResizedCrop.get_params`` of torchvision."""
    for _ in range(TRIES):
        area, aspect = _area_and_aspect(width * height, scale, ratio, rng)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1)), w, h
    w, h = width, height
    if width / height < ratio[0]:
        h = max(1, round(w / ratio[0]))
    elif width / height > ratio[1]:
        w = max(1, round(h * ratio[1]))
    return (width - w) // 2, (height - h) // 2, w, h


def _area_and_aspect(whole: int, scale: Sequence[float], ratio: Sequence[float], rng: Generator) -> tuple[float, float]:
    return whole * rng.uniform(scale[0], scale[1]), math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))


def erased_part_of(
    width: int, height: int, scale: Sequence[float], ratio: Sequence[float], rng: Generator
) -> tuple[int, int, int, int] | None:
    """Return left, top, width and height of a random region, like ``RandomErasing.get_params`` of torchvision.

    The region is smaller than the image on both sides; None if ``TRIES`` attempts find no such region.
    """
    for _ in range(TRIES):
        area, aspect = _area_and_aspect(width * height, scale, ratio, rng)
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if h < height and w < width:
            top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            return left, top, w, h
    return None


@augmentation(padding=Kind("a whole number from 0 on", lambda value: WHOLE.fits(value) and value >= 0), fill=BYTE,
              padding_mode=Kind(f"one of {', '.join(_PADDINGS)}", lambda value: value in _PADDINGS))  # fmt: skip
def random_crop(padding: int = 4, fill: float = 0, padding_mode: str = "constant") -> Augmentation:
    """Pad each side and crop to the original size (``torchvision.transforms.RandomCrop`` with padding).

    Args:
        padding: pixels per side.
        fill: value of a constant border, for all channels.
        padding_mode: as in torchvision: ``"constant"``, ``"edge"``, ``"reflect"``, ``"symmetric"``.
    """

    def cut(image: Any, rng: Generator) -> Any:
        from PIL import Image

        array = np.asarray(image)
        around = [(padding, padding)] * 2 + [(0, 0)] * (array.ndim - 2)
        value = {"constant_values": int(fill)} if padding_mode == "constant" else {}
        padded = np.pad(array, around, padding_mode, **value)  # type: ignore[call-overload]
        top, left = (int(rng.integers(2 * padding + 1)) for _ in range(2))
        return Image.fromarray(np.ascontiguousarray(padded[top:, left:][: image.height, : image.width]))

    return Augmentation("sized", cut)


@augmentation(degrees=ANGLES, interpolation=INTERPOLATION, fill=BYTE)
def rotation(degrees: float | Sequence[float], interpolation: str = "nearest", fill: float = 0) -> Augmentation:
    """Rotate about the centre, counter-clockwise, by a random angle (``torchvision.transforms.RandomRotation``).

    Args:
        degrees: the range of angles; a number x stands for −x to x.
        interpolation: nearest, bilinear or bicubic.
        fill: value outside the image, for all channels.
    """

    def turned(image: Any, rng: Generator) -> Any:
        return rotated(image, rng.uniform(*span(degrees)), interpolation, fill)

    return Augmentation("sized", turned)


def rotated(image: Any, angle: float, interpolation: str = "nearest", fill: float = 0) -> Any:
    return image.rotate(angle, INTERPOLATIONS[interpolation], fillcolor=colour(image, fill))


def colour(image: Any, value: float) -> Any:
    """Return a colour, in Pillow's form, with ``value`` in each channel of ``image``."""
    bands = len(image.getbands())
    return int(value) if bands == 1 else (int(value),) * bands


@augmentation(degrees=ANGLES, translate=SHARES.or_none(), scale=RANGE.or_none(), shear=ANGLES.or_none(),
              interpolation=INTERPOLATION, fill=BYTE)  # fmt: skip
def affine(
    degrees: float | Sequence[float] = 0.0,
    translate: Sequence[float] | None = None,
    scale: Sequence[float] | None = None,
    shear: float | Sequence[float] | None = None,
    interpolation: str = "nearest",
    fill: float = 0,
) -> Augmentation:
    """Rotate, translate, scale and shear about the centre (``torchvision.transforms.RandomAffine``).

    Args:
        degrees: the range of angles; a number x stands for −x to x.
        translate: the largest translations as fractions of width and height.
        scale: the range of factors.
        shear: the range of shear angles along x; a number x stands for −x to x.
        interpolation: nearest, bilinear or bicubic.
        fill: value outside the image, for all channels.
    """

    def moved(image: Any, rng: Generator) -> Any:
        angle = rng.uniform(*span(degrees))
        across, down = (share * side for share, side in zip(translate or (0.0, 0.0), image.size, strict=True))
        move = (round(rng.uniform(-across, across)), round(rng.uniform(-down, down)))
        factor = rng.uniform(scale[0], scale[1]) if scale is not None else 1.0
        slant = rng.uniform(*span(shear)) if shear is not None else 0.0
        middle = (image.width * 0.5, image.height * 0.5)
        return transformed(image, inverse_matrix(middle, angle, move, factor, (slant, 0.0)), interpolation, fill)

    return Augmentation("sized", moved)


def transformed(image: Any, matrix: Sequence[float], interpolation: str = "nearest", fill: float = 0) -> Any:
    """Apply an affine map [a, b, c, d, e, f]: the output pixel (x, y) is read from (ax + by + c, dx + ey + f).

    Args:
        interpolation: nearest, bilinear or bicubic.
        fill: value outside the image, for all channels.
    """
    return image.transform(image.size, _AFFINE, matrix, INTERPOLATIONS[interpolation], fillcolor=colour(image, fill))


def inverse_matrix(
    center: tuple[float, float],
    angle: float,
    translate: tuple[float, float],
    scale: float,
    shear: tuple[float, float],
) -> list[float]:
    """Return the affine map from output to input positions, like ``_get_inverse_affine_matrix`` of torchvision.

    Args:
        center: (x, y) of the centre of rotation, scaling and shear.
        angle, shear: in degrees; in torchvision a positive angle of ``affine`` turns clockwise.
        translate: (x, y) in pixels.
        scale: the factor.
    """
    turn, along_x, along_y = (math.radians(degrees) for degrees in (angle, *shear))
    a = math.cos(turn - along_y) / math.cos(along_y)
    b = -math.cos(turn - along_y) * math.tan(along_x) / math.cos(along_y) - math.sin(turn)
    c = math.sin(turn - along_y) / math.cos(along_y)
    d = -math.sin(turn - along_y) * math.tan(along_x) / math.cos(along_y) + math.cos(turn)
    (x, y), (right, down) = center, translate
    first, second = (d / scale, -b / scale), (-c / scale, a / scale)
    to_x = first[0] * (-x - right) + first[1] * (-y - down) + x
    to_y = second[0] * (-x - right) + second[1] * (-y - down) + y
    return [*first, to_x, *second, to_y]

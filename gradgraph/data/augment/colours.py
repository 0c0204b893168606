"""Colour augmentations, and random erasing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradgraph.arguments import NUMBER, NUMBERS, Kind
from gradgraph.data.augment.augmentation import PROBABILITY, RANGE, Array, Augmentation, Generator, augmentation
from gradgraph.data.augment.geometry import erased_part_of, span

FACTOR = Kind("a number of at least 0, or a range of such", lambda value: _is_factor(value))
HUE = Kind("a number from 0 to 0.5, or a range within -0.5 and 0.5", lambda value: _is_hue(value))
VALUE = Kind('a number, or "random"', lambda value: NUMBER.fits(value) or value == "random")


def _is_factor(value: Any) -> bool:
    pair = NUMBERS.fits(value) and len(value) == 2 and value[0] <= value[1]
    return all(0 <= v < 1e6 for v in (value if pair else [value])) if pair or NUMBER.fits(value) else False


def _is_hue(value: Any) -> bool:
    if NUMBER.fits(value):
        return bool(0 <= value <= 0.5)
    return NUMBERS.fits(value) and len(value) == 2 and bool(-0.5 <= value[0] <= value[1] <= 0.5)


def opaque(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``change`` so that it preserves the transparency of an image."""

    def changed(image: Any) -> Any:
        if image.mode != "RGBA":
            return change(image)
        made = change(image.convert("RGB"))
        made.putalpha(image.getchannel("A"))
        return made

    return changed


def adjusted(image: Any, what: str, factor: float) -> Any:
    """Return an image with ``what`` (Brightness, Color, Contrast or Sharpness) scaled; 1 changes nothing."""
    from PIL import ImageEnhance

    return getattr(ImageEnhance, what)(image).enhance(factor)


def with_hue(image: Any, shift: float) -> Any:
    """Return an image whose hue is rotated by a fraction of the circle, as by ``adjust_hue`` of torchvision."""
    from PIL import Image

    if image.mode == "L":
        return image
    hue, saturation, value = image.convert("HSV").split()
    turned = np.asarray(hue) + np.int16(int(shift * 255)).astype(np.uint8)  # wraps around, like hue
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")


@augmentation(brightness=FACTOR, contrast=FACTOR, saturation=FACTOR, hue=HUE)
def color_jitter(
    brightness: float | Sequence[float] = 0.0,
    contrast: float | Sequence[float] = 0.0,
    saturation: float | Sequence[float] = 0.0,
    hue: float | Sequence[float] = 0.0,
) -> Augmentation:
    """Change brightness, contrast, saturation and hue, in random order (``torchvision.transforms.ColorJitter``).

    Args:
        brightness, contrast, saturation: the range of factors; a number x stands for 1 − x to 1 + x.
        hue: the range of the rotation, as a fraction of the circle; a number x stands for −x to x.
    """
    factors = {"Brightness": brightness, "Contrast": contrast, "Color": saturation}
    ranges = [(what, span(value, 1.0, 0.0)) for what, value in factors.items()]
    ranges = [(what, given) for what, given in [*ranges, ("Hue", span(hue))] if given not in ((1.0, 1.0), (0.0, 0.0))]

    def jittered(image: Any, rng: Generator) -> Any:
        for i in rng.permutation(len(ranges)):
            what, given = ranges[i]
            amount = float(rng.uniform(*given))
            change = (lambda im, a=amount: with_hue(im, a)) if what == "Hue" else (
                lambda im, w=what, a=amount: adjusted(im, w, a))  # fmt: skip
            image = opaque(change)(image)
        return image

    return Augmentation("sized", jittered)


@augmentation(p=PROBABILITY, scale=RANGE, ratio=RANGE, value=VALUE)
def random_erasing(
    p: float = 0.5,
    scale: Sequence[float] = (0.02, 0.33),
    ratio: Sequence[float] = (0.3, 3.3),
    value: float | str = 0.0,
) -> Augmentation:
    """Overwrite a rectangle after normalisation (``torchvision.transforms.RandomErasing``; Zhong et al. 2017).

    Args:
        p: probability.
        scale: the range of the fraction of the area.
        ratio: the range of height / width, drawn log-uniformly.
        value: fill value; 0 is the mean of normalised pixels. ``"random"``: numbers from a
            normal distribution, or random bytes if the model reads bytes.
    """

    def erased(array: Array, rng: Generator) -> None:
        if rng.random() >= p:
            return
        height, width = array.shape[:2]
        found = erased_part_of(width, height, scale, ratio, rng)
        if found is None:
            return
        left, top, w, h = found
        there = array[top : top + h, left : left + w]
        if value != "random":
            there[...] = value
        elif array.dtype == np.uint8:
            there[...] = rng.integers(0, 256, there.shape, np.uint8)
        else:
            there[...] = rng.standard_normal(there.shape, np.float32)

    return Augmentation("array", erased)

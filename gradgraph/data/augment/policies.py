"""Augmentation policies: RandAugment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradgraph.arguments import WHOLE, Kind
from gradgraph.data.augment.augmentation import INTERPOLATION, Augmentation, Generator, augmentation
from gradgraph.data.augment.colours import adjusted, opaque
from gradgraph.data.augment.geometry import BYTE, rotated, transformed

COUNT = Kind("a whole number from 0 on", lambda value: WHOLE.fits(value) and value >= 0)
BINS = Kind("a whole number from 2 on", lambda value: WHOLE.fits(value) and value >= 2)

Change = Callable[[Any, float, str, float], Any]  # a function of image, magnitude, interpolation and fill


def _enhanced(what: str) -> Change:
    return lambda image, much, *_: opaque(lambda im: adjusted(im, what, 1.0 + much))(image)


def _by_ops(name: str) -> Change:
    """Return an operation that applies the function ``name`` of Pillow's ImageOps."""

    def changed(image: Any, much: float, *_: Any) -> Any:
        from PIL import ImageOps

        given = {"posterize": (int(much),), "solarize": (much,)}.get(name, ())
        return opaque(lambda im: getattr(ImageOps, name)(im, *given))(image)

    return changed


# name: magnitude as a function of strength s (0 to 1) and (width, height); whether its sign is random; the operation.
# The ranges are those of torchvision.transforms.RandAugment.
CHANGES: dict[str, tuple[Callable[[float, tuple[int, int]], float], bool, Change]] = {
    "Identity": (lambda s, size: 0.0, False, lambda image, *_: image),
    "ShearX": (lambda s, size: 0.3 * s, True,
               lambda image, m, *how: transformed(image, (1, m, 0, 0, 1, 0), *how)),
    "ShearY": (lambda s, size: 0.3 * s, True,
               lambda image, m, *how: transformed(image, (1, 0, 0, m, 1, 0), *how)),
    "TranslateX": (lambda s, size: 150.0 / 331.0 * size[0] * s, True,
                   lambda image, m, *how: transformed(image, (1, 0, -int(m), 0, 1, 0), *how)),
    "TranslateY": (lambda s, size: 150.0 / 331.0 * size[1] * s, True,
                   lambda image, m, *how: transformed(image, (1, 0, 0, 0, 1, -int(m)), *how)),
    "Rotate": (lambda s, size: 30.0 * s, True, rotated),
    "Brightness": (lambda s, size: 0.9 * s, True, _enhanced("Brightness")),
    "Color": (lambda s, size: 0.9 * s, True, _enhanced("Color")),
    "Contrast": (lambda s, size: 0.9 * s, True, _enhanced("Contrast")),
    "Sharpness": (lambda s, size: 0.9 * s, True, _enhanced("Sharpness")),
    "Posterize": (lambda s, size: 8 - round(4 * s), False, _by_ops("posterize")),
    "Solarize": (lambda s, size: 255.0 * (1 - s), False, _by_ops("solarize")),
    "AutoContrast": (lambda s, size: 0.0, False, _by_ops("autocontrast")),
    "Equalize": (lambda s, size: 0.0, False, _by_ops("equalize")),
}  # fmt: skip


@augmentation(num_ops=COUNT, magnitude=COUNT, num_magnitude_bins=BINS, interpolation=INTERPOLATION, fill=BYTE)
def rand_augment(
    num_ops: int = 2,
    magnitude: int = 9,
    num_magnitude_bins: int = 31,
    interpolation: str = "nearest",
    fill: float = 0,
) -> Augmentation:
    """Apply random operations, drawn from 14 (Cubuk et al. 2020; ``torchvision.transforms.RandAugment``).

    Args:
        num_ops: number of operations.
        magnitude: strength, from 0 to below ``num_magnitude_bins``.
        num_magnitude_bins: number of strengths.
        interpolation: nearest, bilinear or bicubic.
        fill: value outside the image, for all channels.
    """
    Kind(f"a whole number below num_magnitude_bins ({num_magnitude_bins})",
         lambda value: value < num_magnitude_bins).check("magnitude", magnitude)  # fmt: skip
    names, strength = list(CHANGES), magnitude / (num_magnitude_bins - 1)

    def changed(image: Any, rng: Generator) -> Any:
        for _ in range(num_ops):
            amount, is_signed, change = CHANGES[names[int(rng.integers(len(names)))]]
            much = amount(strength, image.size)
            if is_signed and rng.random() < 0.5:
                much = -much
            image = change(image, much, interpolation, fill)
        return image

    return Augmentation("sized", changed)

"""The way from an image of Pillow to an array: its size, channels, layout and normalisation."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from gradgraph.arguments import FINITE, NUMBERS, WHOLE, Kind
from gradgraph.augment.augmentation import INTERPOLATION, INTERPOLATIONS, Augmentation, Augmentations
from gradgraph.augment.placing import whole
from gradgraph.errors import DataError, shown
from gradgraph.runtime.data.batch import Array
from gradgraph.runtime.data.image_files import picture_at
from gradgraph.step.manifest import TensorSpec

# those that say how an image becomes an array
ARGUMENTS = ("size", "mean", "std", "layout", "shorter", "resample", "order", "scale", "letterbox", "crop")
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
REVERSED = [2, 1, 0, 3]  # from RGB to BGR and back

Layout = Literal["NCHW", "NHWC"]
Order = Literal["RGB", "BGR"]
Augment = Any  # an augmentation, its name or call, a function, or a list of these


@dataclass(frozen=True)
class ImageForm:
    """The way from an image to an array; the model decides on what is None.

    Attributes:
        letterbox: keep the shape of an image, in the middle of grey; only data with boxes and masks are told so, and a
            model that was trained on them.
        crop: where half of an odd rest ends when the middle is cut out: "round", as in torchvision, or "floor", as in
            transformers; only files beside a model say so.
    """

    size: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    layout: Layout | None = None
    shorter: int | None = None
    resample: str | None = None
    order: Order | None = None
    scale: float | None = None
    letterbox: bool | None = None
    crop: str | None = None
    channels: int | None = None
    raw: bool = False

    def of(self, spec: TensorSpec) -> ImageForm:
        """Complete the form by what the input ``spec`` says of images; raises DataError."""
        if len(spec.shape) != 4:
            raise DataError(f"'{shown(spec.name)}' takes no images: {spec} has not four axes; give arrays")
        layout: Layout = self.layout or ("NHWC" if spec.shape[3] in MODES and spec.shape[1] not in MODES else "NCHW")
        channels, height, width = (spec.shape[i] for i in ((1, 2, 3) if layout == "NCHW" else (3, 1, 2)))
        fixed = (height, width) if isinstance(height, int) and isinstance(width, int) else None
        form = replace(
            self,
            size=self.size or fixed,
            layout=layout,
            channels=channels if isinstance(channels, int) else 3,
            raw=spec.dtype == "uint8",
        )
        for what, value in (("mean", form.mean), ("std", form.std)):
            if value is not None and len(value) != form.channels:
                raise DataError(f"{what} has {len(value)} numbers, and an image {form.channels} channels; give as many")
        if form.channels not in MODES or (fixed is not None and form.size != fixed):
            raise DataError(
                f"images of {form.channels} channels and size {list(form.size or [])} in {form.layout} do not fit "
                f"{spec}; give the size and layout that the model takes"
            )
        if form.raw and (form.mean or form.std or form.scale):
            raise DataError(f"'{shown(spec.name)}' takes bytes, which have no mean, std and scale; leave them out")
        if form.order == "BGR" and form.channels == 1:
            raise DataError(f"'{shown(spec.name)}' takes grey images, which have no order of channels; leave it out")
        if form.shorter is not None and form.size is None:
            raise DataError(
                f"images whose shorter side is {form.shorter} pixels need a size that is cut out of them, and "
                f"'{shown(spec.name)}' leaves it open",
                remedy="give size=(224, 224), say",
                shell="give one with --image size=224",
            )
        return form

    @property
    def given(self) -> dict[str, Any]:
        """Everything that says how an image becomes an array and is not left open."""
        return {name: value for name in ARGUMENTS if (value := getattr(self, name)) is not None}

    def like(self, known: Mapping[str, Any]) -> ImageForm:
        """The form in which what is left open is as it is ``known`` from training."""
        cut = self.size is None and self.shorter is None
        open_ = {name: value for name, value in known.items() if getattr(self, name) is None}
        return replace(self, **{n: value for n, value in open_.items() if cut or n not in ("size", "shorter", "crop")})

    def __call__(self, image: Any, augmented: Augmentations | None = None, seed: Sequence[int] = ()) -> Array:
        """The array of an image of Pillow.

        Args:
            image: the image.
            augmented: change it, by random numbers of this ``seed``.
            seed: numbers below 2^64.
        """
        image = image.convert(MODES[self.channels or 3])
        if augmented is None:
            return self._laid_out(self._normalised(self.resized(image)))
        rng = np.random.default_rng(list(seed))
        array = self._normalised(augmented.of_image(image, rng, self.size, self.resized))
        augmented.of_array(array, rng)
        return self._laid_out(array)

    def resized(self, image: Any) -> Any:
        """The image at its size; as it is, where there is none."""
        how = INTERPOLATIONS[self.resample or "bilinear"]
        if self.shorter is not None:
            short, long = sorted(image.size)
            across = int(self.shorter * long / short)
            image = image.resize((self.shorter, across) if image.width <= image.height else (across, self.shorter), how)
        if self.size is None:
            return image
        height, width = self.size
        if self.shorter is not None:
            left, top = self._cut_off(image.width - width), self._cut_off(image.height - height)
            return image.crop((left, top, left + width, top + height))
        if self.letterbox:
            return whole(image.size, (width, height), True).picture(image, how=how)
        return image if image.size == (width, height) else image.resize((width, height), how)

    def _cut_off(self, rest: int) -> int:
        """How much of a ``rest`` is cut off in front; below zero, how much black is put there."""
        return round(rest / 2) if rest > 0 and self.crop != "floor" else int(rest / 2)

    def _normalised(self, image: Any) -> Array:
        """Make the array [height, width, channels] of an image; nobody else holds it."""
        array = np.array(image)
        if array.ndim == 2:
            array = array[:, :, None]
        if self.order == "BGR":
            array = array[:, :, REVERSED[: array.shape[2]]]
        if not self.raw:
            array = array.astype(np.float32)
            if self.scale is None:
                array /= np.float32(255)
            else:
                array *= np.float32(self.scale)
            if self.mean is not None:
                array -= np.array(self.mean, np.float32)
            if self.std is not None:
                array /= np.array(self.std, np.float32)
        return array

    def _laid_out(self, array: Array) -> Array:
        return array if self.layout == "NHWC" else np.ascontiguousarray(array.transpose(2, 0, 1))

    @property
    def axes(self) -> tuple[int, int]:
        """The axes of height and width of a batch."""
        return (1, 2) if self.layout == "NHWC" else (2, 3)


SIZE = Kind(
    "a height and a width above zero",
    lambda value: isinstance(value, tuple | list) and len(value) == 2 and all(WHOLE.fits(v) and v > 0 for v in value),
)
ORDER = Kind('"RGB" or "BGR"', lambda value: isinstance(value, str) and value in ("RGB", "BGR"))
SCALE = Kind("a number above zero", lambda value: FINITE.fits(value) and value > 0)
LAYOUT = Kind('"NCHW" or "NHWC"', lambda value: isinstance(value, str) and value in ("NCHW", "NHWC"))
ABOVE_ZERO = Kind("a whole number above zero", lambda value: WHOLE.fits(value) and value > 0)
AUGMENT = Kind("an augmentation, what names or calls one, a function, or a list of these",
               lambda value: all(map(_is_augment, value if isinstance(value, list | tuple) else [value])))  # fmt: skip
KINDS = {"size": SIZE.or_none(), "mean": NUMBERS.or_none(), "std": NUMBERS.or_none(), "layout": LAYOUT.or_none(),
         "shorter": ABOVE_ZERO.or_none(), "resample": INTERPOLATION.or_none(), "order": ORDER.or_none(),
         "scale": SCALE.or_none(), "augment": AUGMENT.or_none(),
         "threads": ABOVE_ZERO.or_none()}  # fmt: skip
"""The kinds of the arguments that all sources of images have."""


def _is_augment(value: Any) -> bool:
    return isinstance(value, str | Augmentation) or callable(value)


def form_of(
    size: Sequence[int] | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    layout: Layout | None,
    shorter: int | None = None,
    resample: str | None = None,
    order: Order | None = None,
    scale: float | None = None,
    letterbox: bool | None = None,
) -> ImageForm:
    """Make an ImageForm of the arguments that all readers of pictures have."""
    sides = None if size is None else (size[0], size[1])
    numbers = [None if values is None else tuple(map(float, values)) for values in (mean, std)]
    return ImageForm(sides, numbers[0], numbers[1], layout, shorter, resample, order, scale, letterbox)


def stacked(arrays: Sequence[Array], names: Sequence[str]) -> Array:
    """The arrays of some samples as one; raises DataError, with two of the ``names``, where their shapes differ."""
    other = next((i for i, array in enumerate(arrays) if array.shape != arrays[0].shape), None)
    if other is not None:
        raise DataError(
            f"'{shown(names[0])}' gives an array of shape {list(arrays[0].shape)} and '{shown(names[other])}' one of "
            f"{list(arrays[other].shape)}",
            remedy="give all images one size, as image_folder(path, size=(224, 224))",
            shell="give the size of all images with --image",
        )
    return np.stack(arrays)


def picture_of(array: Array, known: Mapping[str, Any], side: int = 96) -> bytes:
    """A small PNG of the array of an image, [channels, height, width] or [height, width, channels]; raises DataError.

    Args:
        array: bytes, or numbers that ``known`` tells how to take back to [0, 1]; those beyond are cut off. Where
            nobody knows, the smallest is black and the largest white.
        known: arguments of ``image_folder``.
        side: the longest that the picture may have.
    """
    last = known.get("layout") == "NHWC" or (array.shape[0] not in MODES and array.shape[2] in MODES)
    pixels = array if last else array.transpose(1, 2, 0)
    if pixels.shape[2] not in MODES:
        raise DataError(f"an array of shape {list(array.shape)} is no image; give one of 1, 3 or 4 channels")
    if pixels.dtype != np.uint8:
        pixels = pixels.astype(np.float64)
        if known:
            pixels = pixels * np.array(known.get("std", 1.0)) + np.array(known.get("mean", 0.0))
            pixels /= 255 * known.get("scale", 1 / 255)
        else:
            low, high = pixels.min(), pixels.max()
            pixels = (pixels - low) / (high - low) if high > low else np.zeros_like(pixels)
        pixels = np.rint(np.nan_to_num(np.clip(pixels, 0, 1)) * 255).astype(np.uint8)
    if known.get("order") == "BGR":
        pixels = pixels[:, :, REVERSED[: pixels.shape[2]]]
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))
    return _small_png(image, side)


def pictured(file: str, row: Mapping[str, Array], images: Mapping[str, Mapping[str, Any]]) -> bytes:
    """A small PNG of a sample: of its file, or of that array of it which is an image.

    Args:
        file: where it comes from; "" where it has no file.
        row: its arrays by name, without the axis of samples.
        images: how images became arrays, by name.
    """
    try:
        if file:
            return thumbnail(file)
        found = next((name for name, array in row.items() if array.ndim == 3), None)
        return b"" if found is None else picture_of(row[found], images.get(found, {}))
    except (DataError, OSError, ImportError):  # it is there no more, or is no image; or there is no Pillow
        return b""


def thumbnail(path: str, side: int = 96) -> bytes:
    """An image file as a small PNG; raises DataError if it cannot be read."""
    return _small_png(picture_at(path).convert("RGB"), side)


def _small_png(image: Any, side: int) -> bytes:
    image.thumbnail((side, side))
    made = io.BytesIO()
    image.save(made, "PNG")
    return made.getvalue()

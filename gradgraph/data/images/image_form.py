"""Conversion of images to arrays with the size, channels, layout and normalization that a model expects."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from gradgraph.arguments import ABOVE_ZERO, FINITE, NUMBERS, WHOLE, Kind
from gradgraph.data.arrays.batch import Array
from gradgraph.data.augment.augmentation import INTERPOLATION, INTERPOLATIONS, Augmentation, Augmentations
from gradgraph.data.augment.placing import whole
from gradgraph.data.images.image_files import picture_at
from gradgraph.data.record.specs import TensorSpec
from gradgraph.errors import DataError, counted, shown

# the options for converting an image to an array
ARGUMENTS = ("size", "mean", "std", "layout", "shorter", "resample", "order", "scale", "letterbox", "crop")
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
REVERSED = [2, 1, 0, 3]  # from RGB to BGR and back

Layout = Literal["NCHW", "NHWC"]
Order = Literal["RGB", "BGR"]
Augment = Any  # an augmentation, its name or call, a function, or a list of these


@dataclass(frozen=True)
class ImageForm:
    """Options for converting images to arrays; None means that the model's input decides.

    Attributes:
        size, mean, std, layout, shorter, resample, order, scale: as for :func:`gradgraph.image_folder`.
        letterbox: keep the aspect ratio and pad with grey; only for boxes or masks.
        crop: rounding of an odd margin in a centre crop: "round", as in torchvision, or "floor", as in
            transformers; set only by preprocessing files next to a model.
        channels: number of channels.
        raw: whether the model's input is uint8, so pixel values are not scaled.
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
        """Return a copy of these options in which None is replaced by the value that fits the model input ``spec``.

        Raises:
            DataError: if the options do not match the input.
        """
        if len(spec.shape) != 4:
            raise DataError(f"'{shown(spec.name)}' is not an image input: {spec} does not have four axes; pass arrays")
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
                raise DataError(
                    f"{what} has {counted(len(value), 'number')}, but images have "
                    f"{counted(form.channels or 0, 'channel')}; pass one per channel"
                )
        if form.channels not in MODES or (fixed is not None and form.size != fixed):
            raise DataError(
                f"images of {form.channels} channels and size {list(form.size or [])} in {form.layout} do not match "
                f"{spec}; pass the size and layout of the model"
            )
        if form.raw and (form.mean or form.std or form.scale):
            raise DataError(
                f"mean, std and scale have no effect, since the input '{shown(spec.name)}' is uint8; remove them"
            )
        if form.order == "BGR" and form.channels == 1:
            raise DataError(
                f"order has no effect, since the images for '{shown(spec.name)}' have a single channel; remove order"
            )
        if form.shorter is not None and form.size is None:
            raise DataError(
                f"resizing the shorter side to {form.shorter} requires a crop size, but the size of "
                f"'{shown(spec.name)}' is dynamic",
                remedy="pass one, such as size=(224, 224)",
                shell="add one, such as --image size=224",
            )
        return form

    @property
    def given(self) -> dict[str, Any]:
        """Return the options that are not None, by name."""
        return {name: value for name in ARGUMENTS if (value := getattr(self, name)) is not None}

    def like(self, known: Mapping[str, Any]) -> ImageForm:
        """Return a copy of these options in which None is replaced by the option used in training, from ``known``."""
        cut = self.size is None and self.shorter is None
        open_ = {name: value for name, value in known.items() if getattr(self, name) is None}
        return replace(self, **{n: value for n, value in open_.items() if cut or n not in ("size", "shorter", "crop")})

    def __call__(
        self, image: Any, augmented: Augmentations | None = None, rng: np.random.Generator | None = None
    ) -> Array:
        """Convert a Pillow image to an array; augment it if both augmentations and a random generator are passed."""
        image = image.convert(MODES[self.channels or 3])
        if augmented is None or rng is None:
            return self._laid_out(self._normalised(self.resized(image)))
        array = self._normalised(augmented.of_image(image, rng, self.size, self.resized))
        augmented.of_array(array, rng)
        return self._laid_out(array)

    def resized(self, image: Any) -> Any:
        """Resize a Pillow image according to these options; without a size, return it unchanged."""
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
        """Return the number of pixels to crop at the start of an axis that is ``rest`` pixels too long.

        A negative result is the number of black pixels to add there.
        """
        return round(rest / 2) if rest > 0 and self.crop != "floor" else int(rest / 2)

    def _normalised(self, image: Any) -> Array:
        """Return a Pillow image as a new array [height, width, channels], scaled and normalized."""
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
        """The indices of the height and width axes in a batch of images."""
        return (1, 2) if self.layout == "NHWC" else (2, 3)


SIZE = Kind(
    "a height and a width above zero",
    lambda value: isinstance(value, tuple | list) and len(value) == 2 and all(WHOLE.fits(v) and v > 0 for v in value),
)
ORDER = Kind('"RGB" or "BGR"', lambda value: isinstance(value, str) and value in ("RGB", "BGR"))
SCALE = Kind("a number above zero", lambda value: FINITE.fits(value) and value > 0)
LAYOUT = Kind('"NCHW" or "NHWC"', lambda value: isinstance(value, str) and value in ("NCHW", "NHWC"))
AUGMENT = Kind("an augmentation, its name or call as text, a function, or a list of these",
               lambda value: all(map(_is_augment, value if isinstance(value, list | tuple) else [value])))  # fmt: skip
KINDS = {"size": SIZE.or_none(), "mean": NUMBERS.or_none(), "std": NUMBERS.or_none(), "layout": LAYOUT.or_none(),
         "shorter": ABOVE_ZERO.or_none(), "resample": INTERPOLATION.or_none(), "order": ORDER.or_none(),
         "scale": SCALE.or_none(), "augment": AUGMENT.or_none(),
         "threads": ABOVE_ZERO.or_none()}  # fmt: skip
"The argument checks that all image sources share."


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
    """Create an ImageForm from the arguments of :func:`gradgraph.image_folder` and similar functions."""
    sides = None if size is None else (size[0], size[1])
    numbers = [None if values is None else tuple(map(float, values)) for values in (mean, std)]
    return ImageForm(sides, numbers[0], numbers[1], layout, shorter, resample, order, scale, letterbox)


def stacked(arrays: Sequence[Array], names: Sequence[str]) -> Array:
    """Return the arrays of several samples as one array [samples, …].

    Raises:
        DataError: if shapes differ; the message names two such samples by their ``names``.
    """
    other = next((i for i, array in enumerate(arrays) if array.shape != arrays[0].shape), None)
    if other is not None:
        raise DataError(
            f"'{shown(names[0])}' has shape {list(arrays[0].shape)}, but '{shown(names[other])}' in the same batch has "
            f"{list(arrays[other].shape)}",
            remedy="resize all images, as image_folder(path, size=(224, 224))",
            shell="resize all images with --image size=",
        )
    return np.stack(arrays)


def pixels_of(array: Array, known: Mapping[str, Any]) -> Array:
    """Return the pixels of an image from its array: uint8 [height, width, channels], in RGB.

    Args:
        array: [channels, height, width] or [height, width, channels]: uint8 values, or normalized numbers.
        known: the image options by which numbers were normalized, to invert it; without them, the minimum is black and
            the maximum white.

    Raises:
        DataError: if the array does not have 1, 3 or 4 channels.
    """
    last = known.get("layout") == "NHWC" or (array.shape[0] not in MODES and array.shape[2] in MODES)
    pixels = array if last else array.transpose(1, 2, 0)
    if pixels.shape[2] not in MODES:
        raise DataError(f"an array of shape {list(array.shape)} is not an image; pass one with 1, 3 or 4 channels")
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
    return pixels


def picture_of(array: Array, known: Mapping[str, Any], side: int = 96) -> bytes:
    """Convert the array of an image to a small PNG; ``array``, ``known`` and errors as for :func:`pixels_of`.

    Args:
        side: the maximum length of a side in pixels.
    """
    pixels = pixels_of(array, known)
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))
    return _small_png(image, side)


def pictured(file: str, row: Mapping[str, Array], images: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return a small PNG of a sample; empty if it has neither an image file nor an image array.

    Args:
        file: path of the sample's image file; "" if it has none.
        row: arrays of the sample by name, without the sample axis.
        images: image conversion options by input name.
    """
    try:
        if file:
            return thumbnail(file)
        found = next((name for name, array in row.items() if array.ndim == 3), None)
        return b"" if found is None else picture_of(row[found], images.get(found, {}))
    except (DataError, OSError, ImportError):  # the file is missing or not an image, or Pillow is not installed
        return b""


def thumbnail(path: str, side: int = 96) -> bytes:
    """Return an image file as a small PNG; raise DataError if it cannot be read."""
    return _small_png(picture_at(path).convert("RGB"), side)


def _small_png(image: Any, side: int) -> bytes:
    image.thumbnail((side, side))
    made = io.BytesIO()
    image.save(made, "PNG")
    return made.getvalue()

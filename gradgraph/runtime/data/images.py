"""Images as training data: a folder with a subfolder for each class, decoded by Pillow while the step trains."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradgraph.arguments import FUNCTION, NUMBERS, PATH, WHOLE, Kind, checked
from gradgraph.errors import DataError, listed, shown
from gradgraph.files.untrusted.regular import UnreadableError, open_regular, reason_of, regular_bytes
from gradgraph.runtime.data.ahead import loaded_ahead
from gradgraph.runtime.data.batch import Array
from gradgraph.runtime.data.loadable import Loadable
from gradgraph.runtime.data.matching import class_numbers, classes_for, warn_of_missing
from gradgraph.step.data_names import NO_NAMES, DataNames, is_text
from gradgraph.step.manifest import TensorSpec

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")  # Pillow reads more, which are more to trust
ARGUMENTS = ("size", "mean", "std", "layout", "shorter")  # those that say how an image becomes an array
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
MOST_PIXELS = 64_000_000
LARGE_PIXELS = 8_000_000  # larger ones are decoded one at a time
_large = threading.Lock()

Layout = Literal["NCHW", "NHWC"]
Augment = Callable[[Array, np.random.Generator], Array]


@dataclass(frozen=True)
class ImageForm:
    """The way from an image to an array; the model decides on what is None."""

    size: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    layout: Layout | None = None
    shorter: int | None = None
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
        if form.raw and (form.mean or form.std):
            raise DataError(f"'{shown(spec.name)}' takes bytes, which have no mean and std; leave them out")
        return form

    @property
    def given(self) -> dict[str, Any]:
        """Arguments of ``image_folder``: all that is not left open."""
        return {name: value for name in ARGUMENTS if (value := getattr(self, name)) is not None}

    def like(self, known: Mapping[str, Any]) -> ImageForm:
        """The form in which what is left open is as it is ``known`` from training."""
        cut = self.size is None and self.shorter is None
        open_ = {name: value for name, value in known.items() if getattr(self, name) is None}
        return replace(self, **{n: value for n, value in open_.items() if cut or n not in ("size", "shorter")})

    def __call__(self, image: Any) -> Array:
        """The array of an image of Pillow."""
        array = np.asarray(self._resized(image.convert(MODES[self.channels or 3])))
        if array.ndim == 2:
            array = array[:, :, None]
        if not self.raw:
            array = array.astype(np.float32)
            array /= np.float32(255)
            if self.mean is not None:
                array -= np.array(self.mean, np.float32)
            if self.std is not None:
                array /= np.array(self.std, np.float32)
        return array if self.layout == "NHWC" else np.ascontiguousarray(array.transpose(2, 0, 1))

    def _resized(self, image: Any) -> Any:
        bilinear = 2
        if self.size is None:
            return image
        height, width = self.size
        if self.shorter is None:
            return image if image.size == (width, height) else image.resize((width, height), bilinear)
        short, long = sorted(image.size)
        across = int(self.shorter * long / short)
        scaled = (self.shorter, across) if image.width <= image.height else (across, self.shorter)
        image = image.resize(scaled, bilinear)
        left, top = round((image.width - width) / 2), round((image.height - height) / 2)
        return image.crop((left, top, left + width, top + height))


def opened(content: Any, name: str) -> Any:
    """The image in an open file (or bytes), decoded.

    Raises:
        DataError: it cannot be read, or is too large; Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "images are read by Pillow, which is not installed",
            remedy="pip install 'onnx-gradgraph[images]', or give arrays",
            shell="pip install 'onnx-gradgraph[images]', or give arrays",
        ) from None
    try:
        image = Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=FORMATS)
        pixels = image.width * image.height
        if pixels <= MOST_PIXELS:
            if pixels < LARGE_PIXELS:
                image.load()
            else:
                with _large:
                    image.load()
            return image
    except Exception as error:  # of any class: decoders of many formats
        first = str(error).split("\n", 1)[0] or type(error).__name__
        raise DataError(
            f"'{shown(name)}' is no image that can be read ({shown(first)}); replace or remove it"
        ) from None
    raise DataError(
        f"'{shown(name)}' has {image.width} × {image.height} pixels, more than {MOST_PIXELS:,}; scale it down"
    )


SIZE = Kind(
    "a height and a width above zero",
    lambda value: isinstance(value, tuple | list) and len(value) == 2 and all(WHOLE.fits(v) and v > 0 for v in value),
)
LAYOUT = Kind('"NCHW" or "NHWC"', lambda value: isinstance(value, str) and value in ("NCHW", "NHWC"))
ABOVE_ZERO = Kind("a whole number above zero", lambda value: WHOLE.fits(value) and value > 0)


def form_of(
    size: Sequence[int] | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    layout: Layout | None,
    shorter: int | None,
) -> ImageForm:
    """Make an ImageForm of the arguments of ``image_folder`` and ``shards``; raises DataError."""
    if shorter is not None and (size is None or shorter < max(size)):
        raise DataError(
            f"images whose shorter side is {shorter} pixels need a size that fits into them",
            remedy="give size=(224, 224), say",
            shell="give one with --image, too",
        )
    height, width = size or (0, 0)
    numbers = [None if values is None else tuple(map(float, values)) for values in (mean, std)]
    return ImageForm((height, width) if size else None, numbers[0], numbers[1], layout, shorter)


def thumbnail(path: str, side: int = 96) -> bytes:
    """An image file as a small PNG; raises DataError if it cannot be read."""
    try:
        content = regular_bytes(path)
    except UnreadableError as error:
        raise DataError(f"'{shown(path)}' cannot be read ({error}); check the file") from None
    small = opened(content, path).convert("RGB")
    small.thumbnail((side, side))
    made = io.BytesIO()
    small.save(made, "PNG")
    return made.getvalue()


class ImageFolder(Loadable):
    """Images, as :func:`image_folder` explains them: a dataset of pairs (array, number of the class).

    Attributes:
        classes: the names of the subfolders, sorted; empty if the images lie in the folder itself.
        files: the images.
        labels: the number of the class of each.
    """

    def __init__(self, path: Path, form: ImageForm, augment: Augment | None, threads: int) -> None:
        self.path, self.form, self.augment, self.threads = path, form, augment, threads
        self._told = False  # which classes it lacks
        try:
            self.classes = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
            files = [_images_in(path / name) for name in self.classes] if self.classes else [_images_in(path)]
        except OSError as error:
            raise DataError(f"'{shown(path)}' cannot be read ({error.strerror}); give a folder of images") from None
        if empty := [name for name, found in zip(self.classes or ["."], files, strict=True) if not found]:
            where = f"the folders {listed(empty)} of '{shown(path)}' hold" if self.classes else f"'{shown(path)}' holds"
            raise DataError(f"{where} no image ({', '.join(SUFFIXES)}); add some, or remove the empty folder")
        self.files = [file for found in files for file in found]
        self.labels: Array = np.repeat(np.arange(len(files), dtype=np.int64), [len(found) for found in files])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Array, int]:
        return self._load(self.form, i, None), int(self.labels[i]) if self.classes else -1

    def names_for(self, specs: Mapping[str, TensorSpec], known: DataNames) -> DataNames:
        """The classes, and how images are read, for what a step takes: as they are ``known``, where they are.

        Raises:
            UnmatchedError: a class is new.
            DataError: the step takes something else.
        """
        image, label = self._parts(specs)
        classes = {}
        if label is not None:
            where = f"'{shown(self.path)}'"
            if odd := [name for name in self.classes if not is_text(name)]:
                raise DataError(f"{where} has the folders {listed(odd)}, whose names are no UTF-8; rename them")
            classes[label] = classes_for(specs[label], self.classes, known.classes.get(label), where)
            if not self._told:
                warn_of_missing(self.classes, classes[label], where)
            self._told = True
        return DataNames(classes=classes, images={image: self.form.like(known.images.get(image, {})).given})

    def load(
        self,
        batches: Iterator[Sequence[int]],
        specs: Mapping[str, TensorSpec],
        seed: Sequence[int],
        known: DataNames = NO_NAMES,
    ) -> Iterator[dict[str, Array]]:
        """Batches for what a step takes, decoded in threads while it trains. Classes that are ``known`` keep their
        numbers, and what the form leaves open is as it is known.
        """
        image, label = self._parts(specs)
        form = self.form.like(known.images.get(image, {})).of(specs[image])
        labels = self.labels
        if label is not None:
            names = known.classes.get(label, self.classes)
            labels = np.array(class_numbers(self.classes, names, f"'{shown(self.path)}'"))[labels]
        for samples in loaded_ahead(batches, lambda i: (self._load(form, i, seed), i), self.threads):
            batch = {image: stacked([array for array, _ in samples], [str(self.files[i]) for _, i in samples])}
            if label is not None:
                batch[label] = labels[[i for _, i in samples]]
            yield {name: batch[name] for name in specs}

    def _parts(self, specs: Mapping[str, TensorSpec]) -> tuple[str, str | None]:
        """The input that takes images, and the target that takes their classes."""
        images = [name for name, spec in specs.items() if len(spec.shape) == 4]
        others = [name for name in specs if name not in images]
        if len(images) != 1 or len(others) > 1:
            raise DataError(f"an image folder holds images and their classes, and the step takes {listed(specs)}; "
                            "give a dataset of dicts with these names")  # fmt: skip
        image, label = images[0], others[0] if others else None
        if label is not None and not self.classes:
            raise DataError(f"'{shown(self.path)}' has no folder for each class, so there is no '{shown(label)}' for "
                            "its images; sort them into folders, or give a dataset with labels")  # fmt: skip
        return image, label

    def _load(self, form: ImageForm, i: int, seed: Sequence[int] | None) -> Array:
        path = self.files[i]
        try:
            with open_regular(path) as file:
                image = opened(file, str(path))
        except (UnreadableError, OSError) as error:
            raise DataError(f"'{shown(path)}' cannot be read ({reason_of(error)}); check the file") from None
        return array_of(image, form, self.augment, seed, i)


def array_of(image: Any, form: ImageForm, augment: Augment | None, seed: Sequence[int] | None, i: int) -> Array:
    """The array of an image of Pillow, number ``i`` of an epoch with this seed; it is augmented if there is a seed."""
    if augment is None or seed is None:
        return form(image)
    from PIL import Image

    mode = MODES[form.channels or 3]
    array = np.asarray(image.convert(mode))
    rng = np.random.default_rng([*(s % (1 << 64) for s in seed), i])
    made = np.asarray(augment(array[:, :, None] if array.ndim == 2 else array, rng))
    if made.dtype != np.uint8 or made.ndim != 3 or made.shape[2] != form.channels or not made.size:
        raise DataError(
            f"augment returned {made.dtype} of shape {list(made.shape)}; return bytes (uint8) of shape [height, width, "
            f"{form.channels}]"
        )
    return form(Image.fromarray(np.ascontiguousarray(made[:, :, 0] if mode == "L" else made)))


def stacked(arrays: Sequence[Array], names: Sequence[str]) -> Array:
    other = next((i for i, array in enumerate(arrays) if array.shape != arrays[0].shape), None)
    if other is not None:
        raise DataError(
            f"'{shown(names[0])}' gives an array of shape {list(arrays[0].shape)} and '{shown(names[other])}' one of "
            f"{list(arrays[other].shape)}",
            remedy="give all images one size, as image_folder(path, size=(224, 224))",
            shell="give the size of all images with --image",
        )
    return np.stack(arrays)


def _images_in(folder: Path) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders.sort()
        found += [Path(root, name) for name in names if name.lower().endswith(SUFFIXES)]
    return sorted(path for path in found if path.is_file())


def is_image_folder(path: Path) -> bool:
    """Is it a folder of images, or of folders of images, and not one of arrays?"""
    try:
        if not path.is_dir() or next(path.glob("*.npy"), None) is not None:
            return False
        folders = [path, *(p for p in path.iterdir() if p.is_dir())]
        return any(p.suffix.lower() in SUFFIXES for folder in folders for p in folder.iterdir())
    except OSError:  # a name that is too long, say, which is an error where arrays are read
        return False


@checked(path=PATH, size=SIZE.or_none(), mean=NUMBERS.or_none(), std=NUMBERS.or_none(), layout=LAYOUT.or_none(),
         shorter=ABOVE_ZERO.or_none(), augment=FUNCTION.or_none(), threads=ABOVE_ZERO.or_none())  # fmt: skip
def image_folder(
    path: str | os.PathLike[str],
    size: tuple[int, int] | None = None,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    layout: Layout | None = None,
    shorter: int | None = None,
    augment: Augment | None = None,
    threads: int | None = None,
) -> ImageFolder:
    """Images in a folder with a subfolder for each class, for ``fit``, ``evaluate`` and ``predict``.

    ::

        photos = gg.image_folder("photos/", size=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
        trainer.fit(photos, epochs=3, batch_size=32)

    Classes are the sorted names of the subfolders, from 0 on; images are sorted within them, as in torchvision. Each
    image is decoded when its batch comes, in threads, while the step trains: five batches are in memory at most.

    Args:
        path: the folder. Without subfolders, its images have no labels (for ``predict``).
        size: (height, width) to which images are resized (bilinear, as Pillow does it); by default what the model
            takes.
        mean, std: of each channel; bytes are divided by 255, then these are applied.
        layout: ``"NCHW"`` or ``"NHWC"``; by default what the model takes.
        shorter: resize the shorter side to this, and cut ``size`` out of the middle; by default the whole image is
            stretched to ``size``.
        augment: ``augment(image, rng)`` gets bytes [height, width, channels] before they are resized, and a generator
            of random numbers that follows from the trainer's seed, the epoch and the number of the image alone: so a
            resumed run repeats them to the bit. It returns such an array, of any size. Give ``evaluate`` and
            validation another dataset, without it.
        threads: that decode; by default as many as there are cores, at most 8.

    Raises:
        DataError: there is no such folder, or a class without images.
    """
    form = form_of(size, mean, std, layout, shorter)
    return ImageFolder(Path(path), form, augment, threads or min(8, os.cpu_count() or 1))

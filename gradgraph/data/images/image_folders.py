"""Images as training data: a folder with one subfolder per class, decoded by Pillow during training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.arguments import PATH, checked
from gradgraph.data.arrays.batch import Array
from gradgraph.data.augment.augmentation import Augmentations
from gradgraph.data.dataset import Loadable
from gradgraph.data.images.image_files import picture_at
from gradgraph.data.images.image_form import KINDS, Augment, ImageForm, Layout, Order, form_of, stacked
from gradgraph.data.images.image_labels import Labels, check_mixing, mixed, number_of
from gradgraph.data.prefetch import prefetched_samples
from gradgraph.data.record.classes import Classes
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import TensorSpec
from gradgraph.errors import DataError, listed, shown

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class Images(Loadable):
    """A dataset of image files with labels; its items are pairs (array, label).

    Attributes:
        where: description of the source, for messages.
        files: the image files.
        labels: one number per image: a class index, or a regression target; None without labels.
        classes: class names; empty if labels are plain numbers.
    """

    def __init__(
        self, where: str, files: Sequence[Path], labels: Labels | None, form: ImageForm, augment: Augment, threads: int
    ) -> None:
        self.where, self.files, self.labelled, self.form, self.threads = where, list(files), labels, form, threads
        self.augmented = None if augment is None else Augmentations(augment)

    @property
    def labels(self) -> Array | None:
        return None if self.labelled is None else self.labelled.alone[0]

    @property
    def classes(self) -> list[str]:
        return [] if self.labelled is None else self.labelled.alone[1]

    @property
    def augments(self) -> bool:
        """Whether samples are augmented in training."""
        return self.augmented is not None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Array, Any]:
        return self._load(self.form, i, ()), -1 if self.labels is None else self.labels[i].item()

    def names_for(self, specs: Mapping[str, TensorSpec], known: DataNames) -> DataNames:
        """Return the class names and image options for a step; names in ``known`` take precedence.

        Raises:
            UnmatchedError: if a class is not known from training.
            DataError: if the step requires other inputs.
        """
        image, label = self._parts(specs)
        names = DataNames(images={image: self.form.like(known.images.get(image, {})).given})
        if label is None:
            return names
        check_mixing(self.augmented, specs[label])
        labels, columns = self._labels_of(label, known)
        _, classes = labels.matched(specs[label], Classes.known(known, label))
        return names.updated(DataNames(columns=columns)).updated(classes.of(label))

    def load(
        self,
        batches: Iterator[Sequence[int]],
        specs: Mapping[str, TensorSpec],
        seed: Sequence[int],
        known: DataNames = NO_NAMES,
    ) -> Iterator[dict[str, Array]]:
        """Yield batches for a step, decoded in threads, and augmented by ``seed`` unless it is empty.

        Classes in ``known`` keep their indices, and unset image options are read from there.
        """
        image, label = self._parts(specs)
        form = self.form.like(known.images.get(image, {})).of(specs[image])
        targets = None
        if label is not None:
            targets = self._labels_of(label, known)[0].targets(specs[label], Classes.known(known, label))
        for samples in prefetched_samples(batches, lambda i: (self._load(form, i, seed), i), self.threads):
            numbers = [i for _, i in samples]
            batch = {image: stacked([array for array, _ in samples], [str(self.files[i]) for i in numbers])}
            if label is not None and targets is not None:
                batch[label] = targets[numbers]
            if self.augmented is not None and seed:
                batch = mixed(batch, image, label, form, self.augmented, [*seed, numbers[0]])
            yield {name: batch[name] for name in specs}

    def _parts(self, specs: Mapping[str, TensorSpec]) -> tuple[str, str | None]:
        """Return the names of the step's image input and of its target (None if it has no target).

        Raises:
            DataError: if there are other inputs.
        """
        images = [name for name, spec in specs.items() if len(spec.shape) == 4]
        others = [name for name in specs if name not in images]
        if len(images) != 1 or len(others) > 1:
            raise DataError("an image folder provides one image input and its classes, but the step expects "
                            f"{listed(specs)}; pass a dataset of dicts with these names")  # fmt: skip
        return images[0], others[0] if others else None

    def _labels_of(self, target: str, known: DataNames) -> tuple[Labels, dict[str, list[str]]]:
        """Return the labels for a target, and the label column by target (empty: there is no table)."""
        if self.labelled is None:
            raise DataError(f"{self.where} has no subfolders of classes, so its images have no '{shown(target)}'; "
                            "sort them into one folder per class, or pass a dataset with labels")  # fmt: skip
        return self.labelled, {}

    def _load(self, form: ImageForm, i: int, seed: Sequence[int]) -> Array:
        image = picture_at(self.files[i])
        return form(image, self.augmented, number_of(seed, i)) if seed else form(image)


class ImageFolder(Images):
    """A dataset of pairs (array, class index); see :func:`image_folder`.

    Attributes:
        path: the folder.
        classes: the sorted names of the subfolders; empty if the images are in the folder itself.
        files: the image files.
        labels: the class index of each image.
    """

    def __init__(self, path: Path, form: ImageForm, augment: Augment, threads: int) -> None:
        self.path, where = path, f"'{shown(path)}'"
        try:
            classes = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
            files = [_images_in(path / name) for name in classes] if classes else [_images_in(path)]
        except OSError as error:
            raise DataError(f"{where} cannot be read ({error.strerror}); give a folder of images") from None
        if empty := [name for name, found in zip(classes or ["."], files, strict=True) if not found]:
            there = f"the folders {listed(empty)} of {where} contain" if classes else f"{where} contains"
            raise DataError(f"{there} no images ({', '.join(SUFFIXES)}); add some, or remove the empty folder")
        numbers = np.repeat(np.arange(len(files), dtype=np.int64), [len(found) for found in files])
        labels = Labels(where, numbers, classes) if classes else None
        super().__init__(where, [file for found in files for file in found], labels, form, augment, threads)


def _images_in(folder: Path) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders.sort()
        found += [Path(root, name) for name in names if name.lower().endswith(SUFFIXES)]
    return sorted(path for path in found if path.is_file())


def is_image_folder(path: Path) -> bool:
    """Whether the path is a folder of images, or of subfolders of images; a folder with ``.npy`` files is not."""
    try:
        if not path.is_dir() or next(path.glob("*.npy"), None) is not None:
            return False
        folders = [path, *(p for p in path.iterdir() if p.is_dir())]
        return any(p.suffix.lower() in SUFFIXES for folder in folders for p in folder.iterdir())
    except OSError:  # such as a name that is too long; reading the path as arrays raises the error
        return False


@checked(path=PATH, **KINDS)
def image_folder(
    path: str | os.PathLike[str],
    size: tuple[int, int] | None = None,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    layout: Layout | None = None,
    shorter: int | None = None,
    resample: str | None = None,
    order: Order | None = None,
    scale: float | None = None,
    augment: Augment = None,
    threads: int | None = None,
) -> ImageFolder:
    """Read images in a folder with one subfolder per class, for ``fit``, ``evaluate`` and ``predict``.

    ::

        photos = gg.image_folder("photos/", size=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
        trainer.fit(photos, epochs=3, batch_size=32)

    Classes are the sorted names of the subfolders, numbered from 0; images are sorted within them, as in torchvision.
    Images are decoded in threads during training, with at most five batches in memory.

    Args:
        path: the folder. Without subfolders, its images have no labels (for ``predict``).
        size: (height, width) to which images are resized (bilinear, as in Pillow); by default the model's input size.
        mean, std: mean and standard deviation per channel, in channel order, applied after division by 255.
        layout: ``"NCHW"`` or ``"NHWC"``; by default the layout of the model's input.
        shorter: resize the shorter side to this length, and crop ``size`` from the centre, padding with black;
            by default the whole image is stretched to ``size``.
        resample: Pillow's resampling filter: ``"bilinear"`` by default, ``"bicubic"``, ``"nearest"``, ``"lanczos"``, ….
        order: channel order: ``"RGB"`` by default, or ``"BGR"``, as in Caffe and OpenCV.
        scale: factor for pixel values, by default 1/255; 1 keeps the range from 0 to 255.
        augment: random augmentations in training, not in evaluation or prediction. Pass augmentations of
            ``gradgraph.augment``, their names (``["flip", "mixup(alpha=0.2)"]``), or functions ``augment(image, rng)``
            that receive a uint8 array [height, width, channels] before resizing, and return one of any size. Randomness
            depends only on the trainer's seed, the epoch and the index of the image, so a resumed run is bit-identical
            for any number of threads.
        threads: number of decoding threads; by default one per core, at most 8.

    Raises:
        DataError: if the folder does not exist, or a class has no images.
    """
    form = form_of(size, mean, std, layout, shorter, resample, order, scale)
    return ImageFolder(Path(path), form, augment, threads or min(8, os.cpu_count() or 1))

"""Images with labels as training data: in one folder per class, or listed in a table; decoded during training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradgraph.arguments import PATH, TEXT, checked
from gradgraph.data.arrays.batch import Array
from gradgraph.data.augment.augmentation import Augmentations
from gradgraph.data.dataset import Loadable
from gradgraph.data.images.image_files import IMAGES, picture_at
from gradgraph.data.images.image_form import KINDS, Augment, ImageForm, Layout, Order, form_of, stacked
from gradgraph.data.images.mixed_batches import check_mixing, mixed
from gradgraph.data.labelled_files import LabelledFiles, is_folder_of, labelled_folder, labelled_table
from gradgraph.data.prefetch import prefetched_samples
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import Specs
from gradgraph.data.shuffling import generator
from gradgraph.errors import DataError, listed


class Images(Loadable):
    """A dataset of image files with labels; its items are pairs (array, label).

    Attributes:
        path: the folder or table; None for a data frame.
        files: the image files.
        labels: one number per image: a class index, or a regression target; None without labels, or if it takes a model
            to determine the label column of a table.
        classes: class names; empty if labels are plain numbers.
    """

    def __init__(self, found: LabelledFiles, form: ImageForm, augment: Augment, threads: int | None) -> None:
        self.path, self.files, self.form, self.threads = found.path, found.files, form, threads
        self.augmented = None if augment is None else Augmentations(augment)
        self._found = found

    @property
    def labels(self) -> Array | None:
        return self._found.alone[0]

    @property
    def classes(self) -> list[str]:
        return self._found.alone[1]

    def __getitem__(self, i: int) -> tuple[Array, Any]:
        return self._load(self.form, i, ()), -1 if self.labels is None else self.labels[i].item()

    def names_for(self, specs: Specs, known: DataNames) -> DataNames:
        """Return the class names and image options for a step; names in ``known`` take precedence.

        Raises:
            UnmatchedError: if a class is not known from training.
            DataError: if the step requires other inputs.
        """
        image, label = _parts(specs)
        names = DataNames(images={image: self.form.like(known.images.get(image, {})).given})
        if label is None:
            return names
        check_mixing(self.augmented, specs[label])
        return names.updated(self._found.names_for(specs[label], known))

    def load(
        self, batches: Iterator[Sequence[int]], specs: Specs, seed: Sequence[int], known: DataNames = NO_NAMES
    ) -> Iterator[dict[str, Array]]:
        """Yield batches for a step, decoded in threads, and augmented by ``seed`` unless it is empty.

        Classes in ``known`` keep their indices, and unset image options are read from there.
        """
        image, label = _parts(specs)
        form = self.form.like(known.images.get(image, {})).of(specs[image])
        targets = None if label is None else self._found.targets(specs[label], known)
        for samples in prefetched_samples(batches, lambda i: (self._load(form, i, seed), i), self.threads):
            numbers = [i for _, i in samples]
            batch = {image: stacked([array for array, _ in samples], [str(self.files[i]) for i in numbers])}
            if label is not None and targets is not None:
                batch[label] = targets[numbers]
            batch = mixed(batch, image, label, form, self.augmented, seed, numbers[0])
            yield {name: batch[name] for name in specs}

    def _load(self, form: ImageForm, i: int, seed: Sequence[int]) -> Array:
        return form(picture_at(self.files[i]), self.augmented, generator(seed, i))


def _parts(specs: Specs) -> tuple[str, str | None]:
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


def is_image_folder(path: Path) -> bool:
    """Whether the path is a folder of images, or of subfolders of images; a folder with ``.npy`` files is not."""
    return is_folder_of(path, IMAGES) and next(path.glob("*.npy"), None) is None


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
) -> Images:
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
    return Images(labelled_folder(Path(path), IMAGES), form, augment, threads)


@checked(path=TEXT.or_none(), label=TEXT.or_none(), root=PATH.or_none(), **KINDS)
def image_table(
    table: Any,
    path: str | None = None,
    label: str | None = None,
    *,
    root: str | os.PathLike[str] | None = None,
    size: tuple[int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    layout: Layout | None = None,
    shorter: int | None = None,
    resample: str | None = None,
    order: Order | None = None,
    scale: float | None = None,
    augment: Augment = None,
    threads: int | None = None,
) -> Images:
    """Read images listed in a table, for ``fit``, ``evaluate`` and ``predict``.

    ::

        photos = gg.image_table("labels.csv", "path", "label", augment="flip")
        trainer.fit(photos, epochs=3, batch_size=32)

    Text labels are matched by name with the model's classes. Integers are class indices, unless the classes have
    integers as names; other numbers are regression targets. Images are read as by :func:`gradgraph.image_folder`.

    Args:
        table: a DataFrame, or the path of a ``.csv``, ``.parquet``, …
        path: name of the column of paths; by default the only one with paths of images.
        label: name of the label column; by default the one used in training, the one named like the target, ``label``
            or ``class``, or the only other one.
        root: the folder to which paths are relative; by default the folder of the table file.
        size, mean, std, layout, shorter, resample, order, scale, augment, threads: as for
            :func:`gradgraph.image_folder`.

    Raises:
        DataError: if the table or a column does not exist.
    """
    form = form_of(size, mean, std, layout, shorter, resample, order, scale)
    return Images(labelled_table(table, path, label, root, IMAGES), form, augment, threads)

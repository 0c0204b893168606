"""Images with segmentation masks as PNG files, as in Pascal VOC."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gradgraph.arguments import PATH, WHOLE, checked, instance
from gradgraph.data.annotations.annotated import IGNORED, OPTIONS, Options, ignored_by, is_there, laid
from gradgraph.data.annotations.yolo_files import names_in
from gradgraph.data.arrays.batch import Array
from gradgraph.data.augment.placing import NEAREST
from gradgraph.data.dataset import Loadable
from gradgraph.data.images.image_files import IMAGES, MASKS, numbers_at, picture_at
from gradgraph.data.images.image_form import MODES, Augment, ImageForm, Layout, Order, form_of, stacked
from gradgraph.data.labelled_files import files_below
from gradgraph.data.prefetch import prefetched_samples
from gradgraph.data.record.classes import Classes, classes_for
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import Specs, TargetSpec, TensorSpec, numpy_dtype
from gradgraph.errors import DataError, listed, shown

PAIRS = (("images", "masks"), ("JPEGImages", "SegmentationClass"))


class MaskFolder(Loadable):
    """Images and their masks; see :func:`masks`.

    Attributes:
        classes: class names; empty if there are none.
        files: the image files.
        masks: the mask file of each image.
    """

    def __init__(self, files: Sequence[Path], masks: Sequence[Path], classes: Sequence[str], ignore: int,
                 options: Options) -> None:  # fmt: skip
        self.files, self.masks, self.classes, self.ignore, self.options = files, masks, list(classes), ignore, options

    @property
    def augments(self) -> bool:
        """Whether samples are augmented in training."""
        return self.options.augments

    def __getitem__(self, i: int) -> tuple[Array, Array]:
        """Return an image and the class of each of its pixels."""
        form = replace(self.options.form, layout=self.options.form.layout or "NCHW")
        image, mask = self._sample(form, i, (), IGNORED, None)
        return image, mask

    def names_for(self, specs: Specs, known: DataNames) -> DataNames:
        """Return classes and image format, taken from ``known`` if present."""
        image, target = self._parts(specs)
        names = DataNames(images={image: self.options.form_for(image, known).given})
        if not target or not self.classes or specs[target].shape[1] == 1:
            return names
        classes = classes_for(specs[target], self.classes, Classes.known(known, target), f"'{shown(self.where)}'")
        return names.updated(classes.of(target))

    def load(
        self, batches: Iterator[Sequence[int]], specs: Specs, seed: Sequence[int], known: DataNames = NO_NAMES
    ) -> Iterator[dict[str, Array]]:
        """Yield batches of the images with these indices."""
        image, target = self._parts(specs)
        form = self.options.form_for(image, known).of(specs[image])
        ignored = ignored_by(specs[target]) if target and len(specs[target].shape) == 3 else IGNORED
        numbers = self._numbers(target, known)
        for samples in prefetched_samples(
            batches, lambda i: (*self._sample(form, i, seed, ignored, numbers), i), self.options.threads
        ):
            names = [str(self.files[i]) for *_, i in samples]
            made = {image: stacked([array for array, *_ in samples], names)}
            if target:
                dtype = numpy_dtype(specs[target].dtype)
                every = stacked([mask for _, mask, _ in samples], names)
                made[target] = _for_target(every, specs[target]).astype(dtype)
            yield {name: made[name] for name in specs}

    @property
    def where(self) -> Path:
        """The image folder."""
        return self.files[0].parent

    def _parts(self, specs: Specs) -> tuple[str, str]:
        """Return the image input, and the mask target if there is one."""
        images = [n for n, s in specs.items() if len(s.shape) == 4 and not isinstance(s, TargetSpec)]
        others = [n for n in specs if n not in images]
        if len(images) != 1 or len(others) > 1 or any(not _takes_masks(specs[n]) for n in others):
            raise DataError(
                "a folder of masks provides images and the class of each pixel, [N, height, width] or [N, classes, "
                f"height, width], but the step expects {listed([str(spec) for spec in specs.values()])}; pass a "
                "dataset of dicts with these names"
            )
        return images[0], others[0] if others else ""

    def _numbers(self, target: str, known: DataNames) -> Array | None:
        """Return the model's class number for each class of these masks; None if they are equal."""
        classes = Classes.known(known, target)
        if classes is None or not self.classes:
            return None
        numbers = classes.of_names(self.classes, f"'{shown(self.where)}'")
        return None if (numbers == np.arange(len(numbers))).all() else numbers

    def _sample(
        self, form: ImageForm, i: int, seed: Sequence[int], ignored: int, renumbered: Array | None
    ) -> tuple[Array, Array]:
        mask = numbers_at(self.masks[i])
        image = picture_at(self.files[i], mask.size).convert(MODES[form.channels or 3])
        image, place = self.options.placed(image, form, seed, i)
        numbers = np.asarray(place.picture(mask, self.ignore, NEAREST), np.int64)
        counted = numbers != self.ignore
        if renumbered is not None:
            if (beyond := numbers[counted & (numbers >= len(renumbered))]).size:
                raise DataError(
                    f"the mask '{shown(self.masks[i])}' has the class {beyond[0]}, but only {len(renumbered)} classes "
                    f"have names ({listed(self.classes)}); name all classes"
                )
            numbers = renumbered[np.where(counted, numbers, 0)]
        return laid(place, image, form), np.where(counted, numbers, ignored)


def _takes_masks(spec: TensorSpec) -> bool:
    return len(spec.shape) == 3 or (len(spec.shape) == 4 and isinstance(spec.shape[1], int))


def _for_target(masks: Array, spec: TensorSpec) -> Array:
    """Convert class numbers ``[N, height, width]`` to a target's layout: one channel per class if it has four axes.

    A single channel is a foreground mask (class above 0). Ignored pixels (255) are 0 in all channels.
    """
    if len(spec.shape) == 3:
        return masks
    classes = spec.shape[1]
    assert isinstance(classes, int)
    if classes == 1:
        is_any: Array = (masks[:, None] > 0) & (masks[:, None] != IGNORED)
        return is_any
    beyond = masks[(masks >= classes) & (masks != IGNORED)]
    if beyond.size:
        raise DataError(
            f"a mask has the class {beyond[0]}, but '{shown(spec.name)}' has the classes 0 to {classes - 1}; use a "
            "model with more classes"
        )
    is_each: Array = masks[:, None] == np.arange(classes)[:, None, None]
    return is_each


@checked(path=PATH, images=PATH.or_none(), masks=PATH.or_none(), ignore=WHOLE,
         classes=instance(list | tuple, "a list of names").or_none(), **OPTIONS)  # fmt: skip
def masks(
    path: str | os.PathLike[str],
    images: str | None = None,
    masks: str | None = None,
    *,
    classes: Sequence[str] | None = None,
    ignore: int = IGNORED,
    size: tuple[int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    layout: Layout | None = None,
    order: Order | None = None,
    scale: float | None = None,
    letterbox: bool | None = None,
    augment: Augment | None = None,
    threads: int | None = None,
) -> MaskFolder:
    """Read images with masks, PNG files of class numbers, for ``fit``, ``evaluate`` and ``predict``.

    ::

        train = gg.vision.masks("photos/", classes=["background", "road", "car"], augment="flip")

    A target ``[N, height, width]`` gets class numbers, ``[N, 1, height, width]`` a foreground mask (class above 0), and
    ``[N, classes, height, width]`` one mask per class.

    Args:
        path: the folder with ``images`` and ``masks`` (or ``JPEGImages`` and ``SegmentationClass``): the mask of
            ``images/a.jpg`` is ``masks/a.png``, with a palette or one channel. Images without a mask are skipped.
        images, masks: other names for these two folders.
        classes: class names, in order; by default the lines of ``classes.txt``, if it exists.
        ignore: the class number of pixels to ignore; batches contain the ``ignore_index`` of the loss instead.
        size, mean, std, layout, order, scale, letterbox, augment, threads: as for :func:`gradgraph.vision.coco`. Masks
            are augmented like their image, with nearest-neighbour resampling; the loss ignores padding.

    Raises:
        DataError: the folders do not exist, or no image has a mask.
    """
    root = Path(path)
    found = (images or "images", masks or "masks")
    pairs = [found] if images or masks else PAIRS
    pair = next((p for p in pairs if all(is_there(root / name) for name in p)), None)
    if pair is None:
        raise DataError(f"'{shown(path)}' has no folders '{shown(found[0])}' and '{shown(found[1])}'; check the path")
    of_name = {p.stem: p for p in files_below(root / pair[1], MASKS)}
    pictures = [p for p in files_below(root / pair[0], IMAGES) if p.stem in of_name]
    if not pictures:
        raise DataError(f"no image in '{shown(root / pair[0])}' has a mask; the mask of a.jpg must be named a.png")
    names = classes if classes is not None else names_in(root) or ()
    form = form_of(size, mean, std, layout, order=order, scale=scale, letterbox=letterbox)
    return MaskFolder(pictures, [of_name[p.stem] for p in pictures], names, ignore, Options.of(form, augment, threads))

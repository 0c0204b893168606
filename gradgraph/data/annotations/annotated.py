"""Annotated images as training data: batches of images, labels, boxes and masks, augmented together."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gradgraph.arguments import FLAG
from gradgraph.data.annotations.outlines import Polygons, Runs, drawn
from gradgraph.data.arrays.batch import Array
from gradgraph.data.augment.augmentation import AUGMENTATIONS, INTERPOLATIONS, Augmentation, Augmentations
from gradgraph.data.augment.placing import NEAREST, Placing, at_random, whole
from gradgraph.data.dataset import Loadable
from gradgraph.data.images.image_files import picture_at
from gradgraph.data.images.image_form import KINDS, MODES, ImageForm, stacked
from gradgraph.data.prefetch import prefetched_samples
from gradgraph.data.record.classes import Classes, classes_for, warn_of_missing
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import Specs, TargetSpec, TensorSpec, numpy_dtype
from gradgraph.data.shuffling import generator
from gradgraph.errors import DataError, listed, shown

log = logging.getLogger("gradgraph")

VISIBLE = 0.25  # boxes of which a smaller fraction remains visible are dropped
BACKGROUND = "background"
IGNORED = 255  # class number of ignored pixels in masks, as in Pascal VOC

OPTIONS = {name: kind for name, kind in KINDS.items() if name not in ("shorter", "resample")}
OPTIONS["letterbox"] = FLAG.or_none()
FOLLOWED = ("flip", "zoom", "color_jitter")  # augmentations by name that boxes can follow


@dataclass(frozen=True)
class Options:
    """Image preprocessing options; see :func:`gradgraph.vision.coco`.

    Attributes:
        form: size, layout and normalisation of images.
        flip: probability of a horizontal flip.
        zoom: range of the random zoom factor; None for no zoom.
        recolour: augmentations that do not move pixels.
        threads: number of decoding threads; None for the default.
    """

    form: ImageForm
    flip: float = 0.0
    zoom: Sequence[float] | None = None
    recolour: Augmentations | None = None
    threads: int | None = None

    @classmethod
    def of(cls, form: ImageForm, augment: Any, threads: int | None) -> Options:
        return cls(form, *_followed(() if augment is None else augment), threads)

    @property
    def augments(self) -> bool:
        """Whether images are augmented in training."""
        return bool(self.flip or self.zoom or self.recolour is not None)

    def form_for(self, image: str, known: DataNames) -> ImageForm:
        """Return the format of an image input, completed by that of the training data."""
        return replace(self.form.like(known.images.get(image, {})), shorter=None)

    def placed(self, image: Any, form: ImageForm, seed: Sequence[int], i: int) -> tuple[Any, Placing]:
        """Return image ``i``, recoloured, and its placement; both are random unless ``seed`` is empty."""
        rng = generator(seed, i)
        if rng is not None and self.recolour is not None:
            image = _recoloured(image, self.recolour, rng)
        size, letterbox = size_in(form, image.size), bool(form.letterbox)
        if rng is None or not (self.flip or self.zoom):
            return image, whole(image.size, size, letterbox)
        return image, at_random(image.size, size, letterbox, self.flip, self.zoom, rng)


def size_in(form: ImageForm, source: tuple[int, int]) -> tuple[int, int]:
    """Return the width and height of the model input: its fixed size, or else ``source``, the size of the image."""
    return source if form.size is None else (form.size[1], form.size[0])


def laid(place: Placing, image: Any, form: ImageForm) -> Array:
    """Return an image, resampled to its placement, as the array that the model reads."""
    made: Array = form(place.picture(image, how=INTERPOLATIONS[form.resample or "bilinear"]))
    return made


def _followed(given: Any) -> tuple[float, Sequence[float] | None, Augmentations | None]:
    """Split augmentations into flip probability, zoom range, and augmentations that do not move pixels.

    Raises:
        DataError: boxes cannot follow one of the augmentations.
    """
    every, moving, rest = Augmentations(given), dict[str, Augmentation](), list[Any]()
    others: list[Any] = [*every.on_arrays, *every.mixing]
    for step in every.steps:
        name = AUGMENTATIONS.written(step.call)[0] if isinstance(step, Augmentation) else ""
        if isinstance(step, Augmentation) and name in ("flip", "zoom"):
            moving[name] = step
        else:
            (rest if name in ("", *FOLLOWED) else others).append(step)
    if others:
        raise DataError(
            f"boxes and masks cannot follow {listed(map(str, others))}; use {listed(FOLLOWED)}, or functions that "
            "keep the shape"
        )
    arguments = {name: AUGMENTATIONS.written(step.call)[1] for name, step in moving.items()}
    flip = arguments["flip"].get("p", 0.5) if "flip" in arguments else 0.0
    zoom = arguments["zoom"].get("factor", (0.7, 1.4)) if "zoom" in arguments else None
    return flip, zoom, Augmentations(rest) if rest else None


class Truth(NamedTuple):
    """Ground-truth objects of an image: labels ``[n]``, boxes ``[n, 4]``, and whether each is a crowd ``[n]``.

    Boxes have the unit of the detections to compare with.
    """

    labels: Array
    boxes: Array
    crowd: Array


@dataclass(frozen=True)
class Found:
    """The annotated objects of an image.

    Attributes:
        labels: int64 ``[n]``.
        boxes: left, top, right, bottom: float64 ``[n, 4]``, in pixels, or relative to the image size.
        crowd: whether a box contains many objects and is excluded from training: bool ``[n]``.
        outlines: the outline of each object, if known.
        size: width and height of the image, if known.
        in_shares: whether boxes are relative to the image size.
    """

    labels: Array
    boxes: Array
    crowd: Array
    outlines: Sequence[Polygons | Runs | None] = ()
    size: tuple[int, int] | None = None
    in_shares: bool = False

    def in_pixels(self, points: Array, size: tuple[int, int]) -> Array:
        """Convert boxes or corners ``[n, 2 or 4]`` to pixels of an image of ``size`` (width, height)."""
        return points * np.resize(size, points.shape[1]) if self.in_shares else points


class Annotated(Loadable):
    """Annotated images, as read by :func:`gradgraph.vision.coco` and :func:`gradgraph.vision.yolo`.

    Attributes:
        classes: class names, in the order of labels.
        files: the image files.
        found: the objects of each image.
    """

    def __init__(
        self, where: str, classes: Sequence[str], files: Sequence[Path], found: Sequence[Found], options: Options
    ) -> None:
        self.where, self.classes, self.files, self.found, self.options = where, list(classes), files, found, options
        self._told = False  # warned about missing classes
        self._sizes: dict[int, tuple[int, int]] = {}  # of opened images
        if len(set(self.classes)) < len(self.classes):
            raise DataError(f"{where} has two classes of the same name; rename one of them")
        if not files:
            raise DataError(f"{where} has no images; check the path")
        if not self.classes:
            raise DataError(f"{where} has no classes; check the file")

    @property
    def augments(self) -> bool:
        """Whether samples are augmented in training."""
        return self.options.augments

    def __getitem__(self, i: int) -> dict[str, Array]:
        """Return image, labels and boxes (relative centre x, y, width, height) without preprocessing for a model."""
        form = replace(self.options.form, layout=self.options.form.layout or "NCHW")
        parts = {"image": "image", "labels": "labels", "boxes": "boxes"}
        return self._sample(parts, {}, form, i, (), {"labels": np.arange(len(self.classes))})

    def size_of(self, i: int) -> tuple[int, int]:
        """Return width and height of an image."""
        known = self.found[i].size or self._sizes.get(i)
        size: tuple[int, int] = known or self._picture(i).size
        return size

    def form_for(self, specs: Sequence[TensorSpec], known: DataNames) -> ImageForm:
        """Return the image format for a step with these inputs; raise DataError if none of the inputs is an image."""
        spec = next((spec for spec in specs if _part_of(spec) == "image"), None)
        if spec is None:
            raise DataError(
                f"the step expects {listed([str(spec) for spec in specs])}, none of which is an image; use a model "
                "with an image input of 4 axes"
            )
        return self.options.form_for(spec.name, known).of(spec)

    def in_picture(self, i: int, boxes: Array, form: ImageForm) -> Array:
        """Convert boxes (left, top, right, bottom) from fractions of the model input to pixels of image ``i``.

        They are clipped to the image.
        """
        size = self.size_of(i)
        place = whole(size, size_in(form, size), bool(form.letterbox))
        found: Array = np.clip(place.back(boxes * np.array([*place.size, *place.size])), 0, [*size, *size])
        return found

    def truths(self) -> list[Truth]:
        """Return the ground-truth objects of each image, with boxes in pixels of the image."""
        found = enumerate(self.found)
        return [Truth(f.labels, f.in_pixels(f.boxes, self.size_of(i)), f.crowd) for i, f in found]

    # --- for a step ----------------------------------------------------------------------------------------------

    def names_for(self, specs: Specs, known: DataNames) -> DataNames:
        """Return classes and image format, taken from ``known`` if present."""
        parts, names = self._parts(specs), NO_NAMES
        for target, part in parts.items():
            if part in ("labels", "map"):
                found = self.classes if part == "labels" else [BACKGROUND, *self.classes]
                classes = classes_for(specs[target], found, Classes.known(known, target), self.where)
                if not self._told:
                    warn_of_missing(found, classes, self.where)
                names = names.updated(classes.of(target))
        self._told = True
        image = _image_of(parts)
        return names.updated(DataNames(images={image: self.options.form_for(image, known).given}))

    def load(
        self, batches: Iterator[Sequence[int]], specs: Specs, seed: Sequence[int], known: DataNames = NO_NAMES
    ) -> Iterator[dict[str, Array]]:
        """Yield batches of the images with these indices."""
        parts = self._parts(specs)
        form = self.options.form_for(_image_of(parts), known).of(specs[_image_of(parts)])
        numbers = {part: self._numbers(name, part, known) for name, part in parts.items() if part in ("labels", "map")}
        for samples in prefetched_samples(
            batches, lambda i: self._sample(parts, specs, form, i, seed, numbers), self.options.threads
        ):
            yield {name: self._batch(specs[name], part, [s[name] for s in samples]) for name, part in parts.items()}

    def _numbers(self, target: str, part: str, known: DataNames) -> Array:
        """Return the model's class number for each class of these images, after the background in a class map."""
        found = [BACKGROUND, *self.classes] if part == "map" else self.classes
        classes = Classes.known(known, target) or Classes(tuple(found))
        return classes.of_names(found, self.where)

    def classes_of(self, targets: Sequence[TensorSpec], known: DataNames) -> Classes:
        """Return the trained model's classes from ``known``; empty if it was trained on class numbers without names."""
        target = next((spec for spec in targets if _part_of(spec) == "labels"), None)
        return (None if target is None else Classes.known(known, target.name)) or Classes()

    def _parts(self, specs: Specs) -> dict[str, str]:
        """Return the role of each input and target by its axes and element type, since names differ by model."""
        parts = {name: _part_of(spec) for name, spec in specs.items()}
        kinds = [part for part in parts.values() if part]
        if None in parts.values() or kinds.count("image") != 1 or len(set(kinds)) < len(kinds):
            raise DataError(
                f"{self.where} provides images, labels [N, objects], boxes [N, objects, 4] and masks, but the step "
                f"expects {listed([str(spec) for spec in specs.values()])}; pass a dataset of dicts with these names"
            )
        return {name: part for name, part in parts.items() if part}

    def _batch(self, spec: TensorSpec, part: str, arrays: Sequence[Array]) -> Array:
        if part not in ("labels", "boxes", "masks"):
            return stacked(arrays, [part] * len(arrays))
        most, room = max(1, *map(len, arrays)), spec.shape[1]
        if isinstance(room, int) and most > room:
            raise DataError(
                f"an image of {self.where} has {most} objects, but '{shown(spec.name)}' has room for {room}; drop the "
                "image, or build the step with room for more objects"
            )
        count = room if isinstance(room, int) else most
        made = np.full((len(arrays), count, *arrays[0].shape[1:]), -1 if part == "labels" else 0, arrays[0].dtype)
        for row, array in zip(made, arrays, strict=True):
            row[: len(array)] = array
        return made

    # --- one image -------------------------------------------------------------------------------------------------

    def _picture(self, i: int) -> Any:
        image = picture_at(self.files[i], self.found[i].size)
        self._sizes[i] = image.size
        return image

    def _sample(
        self, parts: Mapping[str, str], specs: Specs, form: ImageForm, i: int,
        seed: Sequence[int], numbers: Mapping[str, Array],
    ) -> dict[str, Array]:  # fmt: skip
        image, place = self.options.placed(self._picture(i).convert(MODES[form.channels or 3]), form, seed, i)
        width, height = place.size
        found = self.found[i]
        before = np.clip(found.in_pixels(found.boxes, image.size), 0, [*image.size] * 2)
        boxes = place.boxes(before)
        inside = place.clipped(boxes)
        kept = ~found.crowd & (_areas(before) > 0) & (_areas(inside) >= VISIBLE * _areas(boxes)) & (_areas(inside) > 0)
        made: dict[str, Array] = {}
        for name, part in parts.items():
            dtype = numpy_dtype(specs[name].dtype) if name in specs else np.dtype("float32")
            if part == "image":
                made[name] = laid(place, image, form)
            elif part == "labels":
                made[name] = numbers["labels"][found.labels[kept]].astype(np.int64)
            elif part == "boxes":
                centred = np.concatenate([(inside[:, :2] + inside[:, 2:]) / 2, inside[:, 2:] - inside[:, :2]], 1)
                made[name] = (centred[kept] / [width, height, width, height]).astype(dtype)
            elif part == "shown":
                made[name] = np.asarray(place.picture(blank(image.size), 0, NEAREST)).astype(dtype)
            else:
                of_objects = self._masks(found, image.size, place, inside)
                if part == "masks":
                    made[name] = of_objects[kept].astype(dtype)
                else:
                    made[name] = _as_map(of_objects, found, numbers["map"], specs[name]).astype(dtype)
        return made

    def _masks(self, found: Found, source: tuple[int, int], place: Placing, boxes: Array) -> Array:
        """Return the mask of each object, bool ``[n, height, width]``, from its outline, or else its box."""
        from PIL import Image

        made = np.zeros((len(found.labels), place.size[1], place.size[0]), bool)
        left, top, right, bottom = place.covered
        for k, mask in enumerate(made):
            outline = found.outlines[k] if found.outlines else None
            if isinstance(outline, Runs):
                if outline.size != source[::-1]:
                    raise DataError(f"a mask of {self.where} differs in size from its image; export the masks again")
                mask[:] = np.asarray(place.picture(Image.fromarray(outline.mask().astype(np.uint8)), 0, NEAREST)) > 0
                continue
            polygons = [place.points(found.in_pixels(corners, source)) for corners in outline or ()]
            pixels = drawn(polygons or [boxes[k][[0, 1, 2, 1, 2, 3, 0, 3]].reshape(4, 2)], place.size)
            mask[top:bottom, left:right] = pixels[top:bottom, left:right]
        return made


def _areas(xyxy: Array) -> Array:
    areas: Array = np.prod(np.maximum(xyxy[:, 2:] - xyxy[:, :2], 0), axis=1)
    return areas


def _as_map(masks: Array, found: Found, numbers: Array, spec: TensorSpec) -> Array:
    """Return the class of each pixel; small objects are drawn over large ones, and crowds are ignored."""
    made = np.full(masks.shape[1:], numbers[0], np.int64)
    for k in np.argsort(-masks.sum((1, 2)), kind="stable"):
        made[masks[k]] = ignored_by(spec) if found.crowd[k] else numbers[found.labels[k] + 1]
    return made


def ignored_by(spec: TensorSpec) -> int:
    """Return the label that the loss of a target ignores."""
    given = spec.ignore_index if isinstance(spec, TargetSpec) else None
    return IGNORED if given is None else given


def is_there(path: Path) -> bool:
    """Whether a file or folder exists at ``path``; False for an invalid name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def blank(size: tuple[int, int]) -> Any:
    """Return a greyscale image of ones with this size (width, height)."""
    from PIL import Image

    return Image.new("L", size, 1)


def _recoloured(image: Any, change: Augmentations, rng: np.random.Generator) -> Any:
    """Apply a colour augmentation; raise DataError if it changes the image size."""
    made = change.of_image(image, rng, None, lambda whole: whole)
    if made.size != image.size:
        raise DataError(
            f"augment returned an image of {made.width} × {made.height} pixels for one of {image.width} × "
            f"{image.height}, which boxes and masks cannot follow; keep the size"
        )
    return made


def _part_of(spec: TensorSpec) -> str | None:
    """Return the role of an input or target by its axes and element type; None if no role matches."""
    axes, is_whole = len(spec.shape), numpy_dtype(spec.dtype).kind in "iub"
    if not isinstance(spec, TargetSpec):
        return {4: "image", 3: "shown" if is_whole else None}.get(axes)
    if axes == 2 and is_whole:
        return "labels"
    if axes == 3:
        return "map" if is_whole else "boxes" if spec.shape[2] in (4, None) else None
    return "masks" if axes == 4 else None


def _image_of(parts: Mapping[str, str]) -> str:
    return next(name for name, part in parts.items() if part == "image")

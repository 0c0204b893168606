"""Object annotations in YOLO's format, one text file per image."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gradgraph.arguments import PATH, TEXT, checked
from gradgraph.data.annotations.annotated import OPTIONS, Annotated, Found, Options, is_there
from gradgraph.data.annotations.outlines import Polygons, Runs
from gradgraph.data.arrays.batch import Array
from gradgraph.data.images.image_files import IMAGES
from gradgraph.data.images.image_form import Augment, Layout, Order, form_of
from gradgraph.data.labelled_files import files_below
from gradgraph.errors import DataError, shown, suggestion
from gradgraph.files.untrusted.flat_yaml import LARGEST, Value, flat_yaml_of
from gradgraph.files.untrusted.regular import UnreadableError, readable, regular_bytes, regular_text

TABLES = ("data.yaml", "dataset.yaml", "data.yml")
CLASSES = ("classes.txt", "obj.names")


@checked(path=PATH, split=TEXT, **OPTIONS)
def yolo(
    path: str | os.PathLike[str],
    split: str = "train",
    *,
    size: tuple[int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    layout: Layout | None = None,
    order: Order | None = None,
    scale: float | None = None,
    letterbox: bool | None = None,
    augment: Augment | None = None,
    threads: int | None = None,
) -> Annotated:
    """Read images with boxes and classes in YOLO's format, for ``fit``, ``evaluate`` and ``predict``.

    ::

        train, val = (gg.vision.yolo("shapes/data.yaml", split) for split in ("train", "val"))

    The text file of ``images/a.jpg`` is ``labels/a.txt``: in each line a class number and centre x, centre y, width and
    height relative to the image, or the corners of a polygon, for masks. An image without a text file has no objects.
    Inputs of the step are recognised as for :func:`gradgraph.vision.coco`.

    Args:
        path: ``data.yaml`` with ``names`` and the folders of splits, its folder, or a folder with ``images``,
            ``labels`` and ``classes.txt``.
        split: "train", "val" or "test" of ``data.yaml``; or the folder of that name in ``images``, if it exists.
        size, mean, std, layout, order, scale, letterbox, augment, threads: as for :func:`gradgraph.vision.coco`.

    Raises:
        DataError: a file is missing or damaged.
    """
    given = Path(path)
    table = next(
        (path for path in (given, *(given / name for name in TABLES)) if is_there(path) and path.is_file()), None
    )
    if table is not None:
        classes, pictures = _of_table(table, split)
    else:
        classes, pictures = _classes_in(given), _in_folder(_split_in(given, split))
    form = form_of(size, mean, std, layout, order=order, scale=scale, letterbox=letterbox)
    found = [_found(picture, len(classes)) for picture in pictures]
    return Annotated(f"'{shown(path)}'", classes, pictures, found, Options.of(form, augment, threads))


def _of_table(file: Path, split: str) -> tuple[list[str], list[Path]]:
    try:
        table = flat_yaml_of(regular_bytes(file, LARGEST))
        classes = _names(table.get("names", ""))
    except UnreadableError as error:
        raise DataError(f"'{shown(file)}' is not a valid data set description ({error}); check the file") from None
    if split == "val" and "valid" in table and "val" not in table:
        split = "valid"
    if not (places := table.get(split)):
        known = [name for name in ("train", "val", "valid", "test") if table.get(name)]
        raise DataError(f"'{shown(file)}' has no split '{shown(split)}'{suggestion(split, known)}")
    root = table.get("path", "")
    base = file.parent / root if isinstance(root, str) else file.parent
    found = []
    for place in [places] if isinstance(places, str) else list(places):
        options = [base / place, file.parent / place, file.parent / place.removeprefix("../")]
        at = next((option for option in options if is_there(option)), None)
        if at is None:
            raise DataError(f"'{shown(file)}' refers to '{shown(place)}', which does not exist; check the path")
        listing = at.suffix == ".txt"
        found += [base / line.strip() for line in _lines(at) if line.strip()] if listing else _in_folder(at)
    return classes, found


def _names(given: Value) -> list[str]:
    if isinstance(given, list):
        return given
    if not isinstance(given, dict) or not all(key.isdecimal() and len(key) < 7 for key in given):
        raise UnreadableError("'names' is neither a list of classes nor a table of them by number")
    numbers = {int(key): name for key, name in given.items()}
    if sorted(numbers) != list(range(len(numbers))):
        raise UnreadableError("the class numbers in 'names' are not 0, 1, 2, …")
    return [numbers[i] for i in range(len(numbers))]


def names_in(folder: Path) -> list[str] | None:
    """Return the class names in ``classes.txt`` or ``obj.names``, one per line; None if neither exists."""
    file = next((folder / name for name in CLASSES if is_there(folder / name)), None)
    return None if file is None else [line.strip() for line in _lines(file) if line.strip()]


def _classes_in(folder: Path) -> list[str]:
    if (names := names_in(folder)) is None:
        raise DataError(
            f"'{shown(folder)}' has neither data.yaml nor classes.txt; write the class names to classes.txt, one per "
            "line"
        )
    return names


def _split_in(folder: Path, split: str) -> Path:
    images = folder / "images"
    return images / split if is_there(images / split) else images


def _in_folder(folder: Path) -> list[Path]:
    if found := files_below(folder, IMAGES):
        return found
    raise DataError(f"'{shown(folder)}' contains no {IMAGES}; check the path")


def _lines(file: Path) -> list[str]:
    with readable(file):
        return regular_text(file, 1 << 26).splitlines()


def _text_of(picture: Path) -> Path:
    """Return the path of an image's annotation file: the last folder ``images`` becomes ``labels``, the suffix .txt."""
    parts = list(picture.parts)
    places = [i for i, part in enumerate(parts[:-1]) if part == "images"]
    if places:
        parts[places[-1]] = "labels"
    return Path(*parts).with_suffix(".txt")


def _found(picture: Path, classes: int) -> Found:
    file = _text_of(picture)
    labels: list[int] = []
    boxes: list[Array] = []
    outlines: list[Polygons | Runs | None] = []
    for number, line in enumerate(_lines(file) if is_there(file) else [], 1):
        if not line.strip():
            continue
        try:
            values = np.array([float(word) for word in line.split()])
        except ValueError:
            raise _odd(file, number, "contains a value that is not a number") from None
        if len(values) != 5 and (len(values) < 7 or len(values) % 2 == 0):
            raise _odd(file, number, f"has {len(values)} numbers, but a class and a box are 5")
        if not (values[0].is_integer() and 0 <= values[0] < classes):
            raise _odd(file, number, f"has the class {values[0]:g}, but the classes are 0 to {classes - 1}")
        if not (np.abs(values[1:]) <= 2).all():
            raise _odd(file, number, "seems to use pixels, but boxes are relative to the image, from 0 to 1")
        labels.append(int(values[0]))
        boxes.append(_box(values[1:]))
        outlines.append(None if len(values) == 5 else [values[1:].reshape(-1, 2)])
    crowd = np.zeros(len(labels), bool)
    return Found(np.array(labels, np.int64), np.array(boxes).reshape(-1, 4), crowd, outlines, in_shares=True)


def _box(values: Array) -> Array:
    if len(values) == 4:
        return np.concatenate([values[:2] - values[2:] / 2, values[:2] + values[2:] / 2])
    corners = values.reshape(-1, 2)
    return np.concatenate([corners.min(0), corners.max(0)])


def _odd(file: Path, number: int, what: str) -> DataError:
    return DataError(f"line {number} of '{shown(file)}' {what}; correct the line")

"""Annotations of objects in a JSON file, as COCO has them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.arguments import PATH, checked
from gradgraph.errors import DataError, listed, shown
from gradgraph.files.untrusted.contained_paths import check_relative
from gradgraph.files.untrusted.documents import Fields, json_of, tables_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes
from gradgraph.runtime.data.image_form import Augment, Layout, Order, form_of
from gradgraph.vision.annotated import OPTIONS, Annotated, Found, Options, is_there
from gradgraph.vision.outlines import outline_of

log = logging.getLogger("gradgraph")

LARGEST = 1 << 30  # bytes; those of COCO's 118,000 pictures have 450 MB
MANY_CROWDS = 0.1  # of all objects; of COCO's own, 1.2 %
NAMES = ("annotations.json", "_annotations.coco.json", "instances.json")


@checked(path=PATH, images=PATH.or_none(), **OPTIONS)
def coco(
    path: str | os.PathLike[str],
    images: str | os.PathLike[str] | None = None,
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
    """Pictures with boxes, classes and outlines from COCO's JSON, for ``fit``, ``evaluate`` and ``predict``.

    ::

        train = gg.vision.coco("coco/annotations.json", augment=["flip", "zoom"])
        trainer.fit(train, epochs=30, batch_size=8)

    A step gets what it takes, by axes and type: the picture; labels, int64 ``[N, objects]``, −1 where one has fewer;
    boxes ``[N, objects, 4]``, each centre x, centre y, width and height in shares of what the model gets; masks
    ``[N, objects, height, width]`` of outlines; or a map of classes, int64 ``[N, height, width]``, 0 for the
    background. Labels are numbered in the order of the ids of COCO's categories, from 0 on. Boxes marked ``iscrowd``
    are left out of labels, boxes and masks.

    Args:
        path: the JSON file, or its folder.
        images: the folder of the pictures; by default it is looked for beside the file.
        size, mean, std, layout, order, scale: of the arrays, as for :func:`gradgraph.image_folder`.
        letterbox: keep the shape of a picture, in the middle of grey (114). By default it is as in training, or else
            pictures are stretched.
        augment: as for :func:`gradgraph.image_folder`, of what boxes can follow: ``"flip"``, ``"zoom"``,
            ``"color_jitter(…)"`` and functions that keep the shape, or a list of them. Boxes of which less than a
            quarter is left do not count.
        threads: that decode; by default as many as there are cores, at most 8.

    Raises:
        DataError: the file is no such JSON, all its objects are crowds, or the pictures are not there.
    """
    file = _json_at(Path(path))
    where = f"'{shown(file)}'"
    try:
        table = Fields(json_of(regular_bytes(file, LARGEST), largest=LARGEST), "it")
        classes, numbers = _classes(table)
        pictures = {entry.whole("id"): entry for entry in tables_of(table.value("images"), "images")}
        objects: dict[int, list[Fields]] = {number: [] for number in pictures}
        for entry in tables_of(table.value("annotations"), "annotations"):
            of = entry.whole("image_id")
            if of not in objects:
                raise UnreadableError(f"{entry.what} is of the image {of}, which is not there")
            objects[of].append(entry)
        names = [_relative(entry.text("file_name")) for entry in pictures.values()]
        found = [_found(entry, objects[number], numbers) for number, entry in pictures.items()]
    except UnreadableError as error:
        raise DataError(f"{where} is no file of COCO annotations ({error}); check the file") from None
    _check_crowds(sum(int(f.crowd.sum()) for f in found), sum(len(f.crowd) for f in found), where)
    folder = Path(images) if images is not None else _folder_of(file, names[0] if names else "")
    options = Options.of(form_of(size, mean, std, layout, None, None, order, scale, letterbox), augment, threads)
    return Annotated(where, classes, [folder / name for name in names], found, options)


def _check_crowds(crowds: int, objects: int, where: str) -> None:
    """Raise DataError where all objects are crowds, and warn where many are: some tools mark every mask so."""
    if not crowds or crowds < MANY_CROWDS * objects:
        return
    marked = f"{where} marks {crowds} of {objects} objects as iscrowd, and crowds are not trained on"
    remedy = "where each is one object (CVAT marks masks so), set iscrowd to 0"
    if crowds == objects:
        raise DataError(f"{marked}; {remedy}")
    log.warning("%s; %s", marked, remedy)


def _json_at(path: Path) -> Path:
    if not is_there(path) or not path.is_dir():
        return path
    there = [path / name for name in NAMES if (path / name).is_file()] or sorted(path.glob("*.json"))
    if len(there) != 1:
        has = f"{len(there)} JSON files ({listed([p.name for p in there])})" if there else "no JSON file"
        raise DataError(f"'{shown(path)}' has {has}; give the path of the one with the annotations")
    return there[0]


def _classes(table: Fields) -> tuple[list[str], dict[int, int]]:
    """The names of the categories in the order of their ids, and the number of each id."""
    entries = tables_of(table.value("categories"), "categories")
    by_id = {entry.whole("id"): entry.text("name") for entry in entries}
    return [by_id[key] for key in sorted(by_id)], {key: i for i, key in enumerate(sorted(by_id))}


def _relative(name: str) -> str:
    try:
        return check_relative(name)
    except UnreadableError as error:
        raise UnreadableError(f"the picture '{shown(name)}': {error}") from None


def _found(picture: Fields, objects: Sequence[Fields], numbers: dict[int, int]) -> Found:
    labels, boxes, crowd, outlines = [], [], [], []
    for entry in objects:
        category = entry.whole("category_id")
        if category not in numbers:
            raise UnreadableError(f"{entry.what} is of the category {category}, which is not there")
        x, y, width, height = _box(entry)
        labels.append(numbers[category])
        boxes.append((x, y, x + width, y + height))
        crowd.append(bool(entry.whole("iscrowd", 0)))
        given = entry.value("segmentation")
        outlines.append(outline_of(given, f"'segmentation' of {entry.what}") if given else None)
    size = (picture.whole("width", 0), picture.whole("height", 0))
    return Found(
        np.array(labels, np.int64),
        np.array(boxes, np.float64).reshape(-1, 4),
        np.array(crowd, bool),
        outlines if any(outline is not None for outline in outlines) else (),
        size if all(size) else None,
    )


def _box(entry: Fields) -> tuple[float, ...]:
    given: Any = entry.value("bbox")
    fits = isinstance(given, list) and len(given) == 4 and all(type(n) in (int, float) for n in given)
    if not fits or not all(abs(n) < 1e9 for n in given):
        raise UnreadableError(f"the 'bbox' of {entry.what} is no list of left, top, width and height")
    return tuple(map(float, given))


def _folder_of(file: Path, name: str) -> Path:
    """Where the first picture is: beside the file, in ``images``, or where COCO's own archives lie."""
    split = file.stem.removeprefix("instances_")
    near = [file.parent, file.parent / "images", file.parent / split, file.parent / "images" / split]
    around = file.parent.parent
    places = [*near, around, around / "images", around / split, around / "images" / split]
    for place in places:
        if is_there(place / name):
            return place
    raise DataError(
        f"the picture '{shown(name)}' of '{shown(file)}' is neither beside it nor in '{shown(file.parent / 'images')}'",
        remedy="say where: gradgraph.vision.coco(path, images='photos/')",
        shell="say where: --image images=photos/",
    )

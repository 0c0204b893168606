"""Object annotations in COCO's JSON format."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.arguments import PATH, checked
from gradgraph.data.annotations.annotated import OPTIONS, Annotated, Found, Options, is_there
from gradgraph.data.annotations.outlines import outline_of
from gradgraph.data.images.image_form import Augment, Layout, Order, form_of
from gradgraph.errors import DataError, listed, shown
from gradgraph.files.untrusted.contained_paths import check_relative
from gradgraph.files.untrusted.documents import Fields, json_of, tables_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes

log = logging.getLogger("gradgraph")

LARGEST = 1 << 30  # bytes; COCO's 118,000 images have 450 MB of annotations
MANY_CROWDS = 0.1  # fraction of crowds among objects from which on a warning is logged; COCO has 1.2 %
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
    """Read images with boxes, classes and outlines from COCO's JSON, for ``fit``, ``evaluate`` and ``predict``.

    ::

        train = gg.vision.coco("coco/annotations.json", augment=["flip", "zoom"])
        trainer.fit(train, epochs=30, batch_size=8)

    Inputs of the step are recognised by axes and type: the image; labels, int64 ``[N, objects]``, padded with −1;
    boxes ``[N, objects, 4]``, each centre x, centre y, width and height relative to the model's input; masks
    ``[N, objects, height, width]``, drawn from the outlines; or a class map, int64 ``[N, height, width]``, 0 for the
    background. Labels are numbered from 0 in the order of COCO's category ids. Objects marked ``iscrowd``
    are excluded from labels, boxes and masks.

    Args:
        path: the JSON file, or its folder.
        images: the image folder; by default searched for next to the file.
        size, mean, std, layout, order, scale: image preprocessing, as for :func:`gradgraph.image_folder`.
        letterbox: keep the aspect ratio and pad with grey (114). Default: as in training, otherwise
            images are stretched.
        augment: as for :func:`gradgraph.image_folder`, limited to what boxes can follow: ``"flip"``, ``"zoom"``,
            ``"color_jitter(…)"`` and functions that keep the shape, or a list of them. Boxes with less than a
            quarter remaining are dropped.
        threads: number of decoding threads; by default one per core, at most 8.

    Raises:
        DataError: the file is not valid COCO JSON, all its objects are crowds, or images are missing.
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
                raise UnreadableError(f"{entry.what} refers to the image {of}, which does not exist")
            objects[of].append(entry)
        names = [_relative(entry.text("file_name")) for entry in pictures.values()]
        found = [_found(entry, objects[number], numbers) for number, entry in pictures.items()]
    except UnreadableError as error:
        raise DataError(f"{where} is not a valid COCO annotation file ({error}); check the file") from None
    _check_crowds(sum(int(f.crowd.sum()) for f in found), sum(len(f.crowd) for f in found), where)
    folder = Path(images) if images is not None else _folder_of(file, names[0] if names else "")
    form = form_of(size, mean, std, layout, order=order, scale=scale, letterbox=letterbox)
    return Annotated(where, classes, [folder / name for name in names], found, Options.of(form, augment, threads))


def _check_crowds(crowds: int, objects: int, where: str) -> None:
    """Raise DataError if all objects are crowds, and warn if many are: some annotation tools mark every mask as one."""
    if not crowds or crowds < MANY_CROWDS * objects:
        return
    marked = f"{where} marks {crowds} of {objects} objects as iscrowd, which are excluded from training"
    remedy = "if each is a single object (CVAT exports masks as iscrowd), set iscrowd to 0"
    if crowds == objects:
        raise DataError(f"{marked}; {remedy}")
    log.warning("%s; %s", marked, remedy)


def _json_at(path: Path) -> Path:
    if not is_there(path) or not path.is_dir():
        return path
    there = [path / name for name in NAMES if (path / name).is_file()] or sorted(path.glob("*.json"))
    if len(there) != 1:
        has = f"{len(there)} JSON files ({listed([p.name for p in there])})" if there else "no JSON file"
        raise DataError(f"'{shown(path)}' has {has}; pass the path of the annotation file")
    return there[0]


def _classes(table: Fields) -> tuple[list[str], dict[int, int]]:
    """Return category names in the order of their ids, and the class number of each id."""
    entries = tables_of(table.value("categories"), "categories")
    by_id = {entry.whole("id"): entry.text("name") for entry in entries}
    return [by_id[key] for key in sorted(by_id)], {key: i for i, key in enumerate(sorted(by_id))}


def _relative(name: str) -> str:
    try:
        return check_relative(name)
    except UnreadableError as error:
        raise UnreadableError(f"the image path '{shown(name)}' is not allowed: {error}") from None


def _found(picture: Fields, objects: Sequence[Fields], numbers: dict[int, int]) -> Found:
    labels, boxes, crowd, outlines = [], [], [], []
    for entry in objects:
        category = entry.whole("category_id")
        if category not in numbers:
            raise UnreadableError(f"{entry.what} refers to the category {category}, which does not exist")
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
        raise UnreadableError(f"the 'bbox' of {entry.what} is not a list of left, top, width and height")
    return tuple(map(float, given))


def _folder_of(file: Path, name: str) -> Path:
    """Return the folder of the image ``name``: the one of ``file``, its ``images``, or those of COCO's archives."""
    split = file.stem.removeprefix("instances_")
    near = [file.parent, file.parent / "images", file.parent / split, file.parent / "images" / split]
    around = file.parent.parent
    places = [*near, around, around / "images", around / split, around / "images" / split]
    for place in places:
        if is_there(place / name):
            return place
    raise DataError(
        f"the image '{shown(name)}' of '{shown(file)}' is neither next to it nor in '{shown(file.parent / 'images')}'",
        remedy="pass its folder: gradgraph.vision.coco(path, images='photos/')",
        shell="pass its folder: --image images=photos/",
    )

"""Detection of the annotation format of a path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradgraph.arguments import PATH, checked
from gradgraph.data.annotations.annotated import Annotated
from gradgraph.data.annotations.coco_files import NAMES, coco
from gradgraph.data.annotations.mask_folders import PAIRS, MaskFolder, masks
from gradgraph.data.annotations.yolo_files import TABLES, yolo
from gradgraph.errors import DataError, shown


def reader_of(path: Path) -> Callable[..., Annotated | MaskFolder] | None:
    """Return the reader for this path, by its name and its contents; None for unknown formats."""
    try:
        if path.suffix.lower() == ".json":
            return coco
        if path.suffix.lower() in (".yaml", ".yml"):
            return yolo
        if not path.is_dir():
            return None
        if any((path / name).is_file() for name in NAMES):
            return coco
        if any((path / name).is_file() for name in TABLES) or all(
            (path / name).is_dir() for name in ("images", "labels")
        ):
            return yolo
        if any(all((path / name).is_dir() for name in pair) for pair in PAIRS):
            return masks
    except OSError:
        return None
    return None


def is_annotated(path: str | os.PathLike[str]) -> bool:
    """Whether a file or folder has the format of COCO, YOLO or Pascal VOC."""
    return reader_of(Path(path)) is not None


@checked(path=PATH)
def read(path: str | os.PathLike[str], **options: Any) -> Annotated | MaskFolder:
    """Read the images in a file or folder by :func:`coco`, :func:`yolo` or :func:`masks`, with their options.

    A ``.json``, or a folder with ``annotations.json``, is read as COCO; a ``.yaml``, or a folder with ``data.yaml``, or
    with ``images`` and ``labels``, as YOLO; a folder with ``images`` and ``masks`` as masks.

    Raises:
        DataError: the file or folder has none of these formats.
    """
    if (reader := reader_of(Path(path))) is None:
        raise DataError(
            f"'{shown(path)}' is not in the format of COCO (annotations.json), YOLO (data.yaml, labels) or Pascal VOC "
            "(images, masks); check the path"
        )
    return reader(path, **options)

"""Data that the command line reads otherwise than Python does: how images become arrays is an option there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gradgraph.cli.choices import Suggested
from gradgraph.cli.key_values import arguments
from gradgraph.cli.sections import placed
from gradgraph.errors import DataError, shown, suggestion

IMAGE = placed(
    "data",
    "--image",
    of="",
    multiple=True,
    callback=arguments,
    metavar="KEY=VALUE",
    help="How images become arrays, such as mean=[0.5,0.5,0.5], std=…, size=[224,224], shorter=256, layout=NHWC; "
    "repeatable.",
)


def _columns(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """``a,b``: the names of columns; one that has a comma is given by itself."""
    return tuple(given) if len(given) > 1 else tuple(name for text in given for name in text.split(",") if name)


TARGET = placed(
    "data",
    "--target",
    multiple=True,
    callback=_columns,
    metavar="COLUMN,…",
    help="The column of a table that is learnt, or several; repeatable. By default that of the target's name.",
)


AUGMENT = placed(
    "data",
    "--augment",
    multiple=True,
    type=Suggested("augment:AUGMENTATIONS"),
    metavar="NAME",
    help="Change the images that are trained on at random: flip, 'random_resized_crop(scale=[0.5,1])', "
    "'mixup(alpha=0.2)', …; repeatable.",
)


def read_data(path: Path, given: Mapping[str, Any], augment: Sequence[str] = ()) -> Any:
    """The dataset of images in a folder, shards or a table, or with boxes or masks; any other ``path`` as it is.

    Raises:
        DataError: ``given`` says how images are read, or ``augment`` changes some, and there are none; or it says that
            wrongly.
    """
    from gradgraph.runtime.data.image_tables import image_table, is_image_table
    from gradgraph.runtime.data.images import image_folder, is_image_folder
    from gradgraph.runtime.data.shards import is_shards, shards
    from gradgraph.vision.reading import reader_of

    kinds: dict[Callable[..., Any], Callable[[Path], bool]] = {
        shards: is_shards,
        image_folder: is_image_folder,
        image_table: is_image_table,
    }

    read = reader_of(path) or next((read for read, is_one in kinds.items() if is_one(path)), None)
    if read is None:
        if given:
            raise DataError(f"--image says how images become arrays, but '{shown(path)}' holds no images")
        if augment:
            raise DataError(f"--augment changes images, but '{shown(path)}' holds none")
        return path
    known = [name for name in inspect.signature(read).parameters if name not in ("path", "augment")]
    for name in given:
        if name not in known:
            raise DataError(f"--image has no '{shown(name)}'{suggestion(name, known)}")
    return read(path, **given, augment=list(augment) or None)

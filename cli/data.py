"""Options that describe how data files are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from gradgraph.cli.choices import PATH, Suggested
from gradgraph.cli.key_values import arguments
from gradgraph.cli.sections import placed

F = TypeVar("F", bound=Callable[..., Any])

READING = (
    placed(
        "data",
        "--image",
        of="",
        multiple=True,
        callback=arguments,
        metavar="KEY=VALUE",
        help="Image preprocessing, such as mean=[0.5,0.5,0.5], std=…, size=[224,224], shorter=256, resample=bicubic, "
        "layout=NHWC, order=BGR, scale=1; repeatable.",
    ),
    placed(
        "data",
        "--tokenizer",
        type=PATH,
        help="The tokenizer.json for the texts of a table (or of .conll). It is copied next to the trained model, "
        "and found there later.",
    ),
    placed(
        "data",
        "--text",
        of="",
        multiple=True,
        callback=arguments,
        metavar="KEY=VALUE",
        help="Text preprocessing, such as text=review, pair=answer, words=tokens, length=128; repeatable.",
    ),
    placed(
        "data",
        "--sound",
        of="",
        multiple=True,
        callback=arguments,
        metavar="KEY=VALUE",
        help="Audio preprocessing of WAV files: rate=16000, seconds=1; repeatable.",
    ),
)


def _columns(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Parse column names separated by commas (``a,b``); a name that contains a comma is quoted, as in a .csv."""
    if len(given) != 1 or ctx.get_parameter_source(parameter.name or "") is not ParameterSource.COMMANDLINE:
        return tuple(given)  # a recipe has a list of names
    from gradgraph.files.untrusted.documents import csv_head

    return tuple(name for name in csv_head(given[0].encode())[0] if name)


TARGET = placed(
    "data",
    "--target",
    multiple=True,
    callback=_columns,
    metavar="COLUMN,…",
    help="Target column(s) of a table; repeatable. Quote a name that contains a comma, as in a .csv. Default: the "
    "column named like the target.",
)


AUGMENT = placed(
    "data",
    "--augment",
    multiple=True,
    type=Suggested("augment:AUGMENTATIONS"),
    metavar="NAME",
    help="Random augmentation of training images or sounds: flip, 'random_resized_crop(scale=[0.5,1])', "
    "'mixup(alpha=0.2)', spec_augment, …; repeatable.",
)


def reading_options(command: F) -> F:
    """Add the options that describe how data are read, which are the arguments of :class:`Reading`."""
    for option in reversed(READING):
        command = option(command)
    return command

"""Parameter types of options, and choices that are read from the tables of names."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import click

from gradgraph.arguments import found_at

PATH = click.Path(path_type=Path)


class BatchSize(click.ParamType[int | str]):
    """A batch size: a number, or ``auto`` with an optional memory limit."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return value if str(value).startswith("auto") else click.IntRange(min=1).convert(value, param, ctx)


BATCH_SIZE = BatchSize()


class Listed(click.Choice[str]):
    """A choice among names that are read from their tables on demand, since importing these takes time.

    Args:
        places: tables or functions that return names, such as ``losses:LOSSES``; or plain names.
    """

    def __init__(self, *places: str) -> None:
        self.places = places
        self.case_sensitive = True

    @property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for place in self.places for name in _names(place))

    def listed(self) -> tuple[str, ...]:
        """Return the choices for help without importing tables: ``names.txt`` lists those of this package."""
        extended = bool(metadata.entry_points(group="gradgraph"))  # other packages may add names
        return tuple(name for place in self.places for name in (_names if extended else _known)(place))

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self.listed())}]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if param is not None and value == param.default:  # avoids the look-up
            return value
        return super().convert(value, param, ctx)


class Briefly(Listed):
    """A choice whose names are too many for one line of help."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "NAME"


class Suggested(Briefly):
    """A choice that is validated later, where the name is looked up."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value


class Named(click.Option):
    """An option whose help ends with the list of choices."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None or not isinstance(self.type, Listed):
            return record
        return record[0], f"{record[1]}  One of {', '.join(self.type.listed())}."


@functools.cache
def written_names() -> dict[str, list[str]]:
    """Return the names of each table as ``make pages`` wrote them: one line each, beginning with the place."""
    lines = (Path(__file__).parent / "names.txt").read_text("utf-8").splitlines()
    return {place: names for place, *names in map(str.split, lines)}


def _known(place: str) -> Iterable[str]:
    """Names at a place: read from memory once its table has been imported, since names may have been added."""
    is_imported = f"gradgraph.{place.partition(':')[0]}" in sys.modules
    return _names(place) if is_imported or ":" not in place else written_names()[place]


def _names(place: str) -> Iterable[str]:
    """Import the names at a place: a function that returns them, a table, or a plain name."""
    if ":" not in place:
        return (place,)
    found = found_at(place)
    return cast("Iterable[str]", found() if callable(found) else found)


BACKENDS, CHECKED_BACKENDS = Briefly("backends:BACKENDS"), Briefly("backends:checked_backends")

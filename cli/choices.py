"""The kinds of value that options take, and the names that some of them choose from, read from their tables."""

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
    """Samples of a batch: a number, or ``auto`` with a limit on memory or without."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return value if str(value).startswith("auto") else click.IntRange(min=1).convert(value, param, ctx)


BATCH_SIZE = BatchSize()


class Listed(click.Choice[str]):
    """One of some names, which are read from their table when they are asked for: importing it takes time.

    Args:
        places: tables of names and functions that give some, such as ``losses:LOSSES``; or names.
    """

    def __init__(self, *places: str) -> None:
        self.places = places
        self.case_sensitive = True

    @property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for place in self.places for name in _names(place))

    def told(self) -> tuple[str, ...]:
        """The choices, for help, which imports no table: ``names.txt`` has what the tables of this package hold."""
        extended = bool(metadata.entry_points(group="gradgraph"))  # other packages add to the tables
        return tuple(name for place in self.places for name in (_names if extended else _told)(place))

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self.told())}]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if param is not None and value == param.default:  # which need not be looked up
            return value
        return super().convert(value, param, ctx)


class Briefly(Listed):
    """Likewise, with names too many for one line."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "NAME"


class Suggested(Briefly):
    """Names of which others are refused where they are looked up, as in Python."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value


class Named(click.Option):
    """An option whose help ends with the names that it takes."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None or not isinstance(self.type, Listed):
            return record
        return record[0], f"{record[1]}  One of {', '.join(self.type.told())}."


@functools.cache
def written_names() -> dict[str, list[str]]:
    """The names of each table as ``make pages`` wrote them: a line for each, its place before them."""
    lines = (Path(__file__).parent / "names.txt").read_text("utf-8").splitlines()
    return {place: names for place, *names in map(str.split, lines)}


def _told(place: str) -> Iterable[str]:
    """The names at a place: those in memory where its table has been imported, and may have been added to."""
    is_imported = f"gradgraph.{place.partition(':')[0]}" in sys.modules
    return _names(place) if is_imported or ":" not in place else written_names()[place]


def _names(place: str) -> Iterable[str]:
    """Read the names at a place: ``step_backends`` gives them, ``LOSSES`` has them, and "none" is one."""
    if ":" not in place:
        return (place,)
    found = found_at(place)
    return cast("Iterable[str]", found() if callable(found) else found)


BACKENDS, CHECKED_BACKENDS = Briefly("backends:BACKENDS"), Briefly("backends:checked_backends")

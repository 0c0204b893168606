"""Parameter types of options, such as choices among names that are read from tables of the library."""

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


class Bytes(click.ParamType[int]):
    """A number of bytes, such as ``256KB``."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from gradgraph.errors import DataError
        from gradgraph.runtime.loop.sizing import limit_of  # slow to import, so help avoids it

        try:
            return limit_of(f"auto:{value}") or 0
        except DataError:
            self.fail(f"{value!r} is not a size in bytes, such as 256KB or 1MiB", param, ctx)


class Listed(click.Choice[str]):
    """A choice among the names in tables of the library. Tables are imported on demand, since that takes time.

    Args:
        places: the places of the choices, such as ``losses:LOSSES``: a table of a module of gradgraph, or a function
            that returns names. A place without a colon is itself a name.
    """

    def __init__(self, *places: str) -> None:
        self.places = places
        self.case_sensitive = True

    @property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for place in self.places for name in _names(place))

    def listed(self) -> tuple[str, ...]:
        """Return the choices for help, read from ``names.txt`` so that no table is imported.

        The tables are imported only if extensions are installed, because these may add names.
        """
        extended = bool(metadata.entry_points(group="gradgraph"))  # other packages may add names
        return tuple(name for place in self.places for name in (_names if extended else _known)(place))

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self.listed())}]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if param is not None and value == param.default:  # avoids the look-up
            return value
        return super().convert(value, param, ctx)


class Briefly(Listed):
    """A choice with too many names for one line of help; the help shows ``NAME`` instead."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "NAME"


class Suggested(Briefly):
    """A choice that accepts any value; the library validates it later."""

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
    """Return the names at each place, read from ``names.txt``, which ``make pages`` writes."""
    lines = (Path(__file__).parent / "names.txt").read_text("utf-8").splitlines()
    return {place: names for place, *names in map(str.split, lines)}


def _known(place: str) -> Iterable[str]:
    """Return the names at a place: from its table if the module is imported already, otherwise from ``names.txt``."""
    is_imported = f"gradgraph.{place.partition(':')[0]}" in sys.modules
    return _names(place) if is_imported or ":" not in place else written_names()[place]


def _names(place: str) -> Iterable[str]:
    """Return the names at a place, after importing its module; a place without a colon is itself a name."""
    if ":" not in place:
        return (place,)
    found = found_at(place)
    return cast("Iterable[str]", found() if callable(found) else found)


BACKENDS, CHECKED_BACKENDS = Briefly("backends:BACKENDS"), Briefly("backends:checked_backends")

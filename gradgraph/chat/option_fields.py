"""Dataclass fields for options, each declared once with its description and its valid values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Any, TypeVar

from gradgraph.arguments import FINITE, WHOLE, Kind, meant
from gradgraph.errors import ArgumentError, shown

T = TypeVar("T")


def option(default: Any, words: str, kind: Kind, **more: Any) -> Any:
    """Return a dataclass field for an option.

    Args:
        default: the default.
        words: description, for help and docs.
        kind: the kind of valid values.
        more: for the command line: ``flag``, another name; ``typed``, the type if the default is None; ``choices``;
            ``names``, the table of valid names; ``suggested``, names among other valid values; ``metavar``, the
            placeholder of a repeatable value.
    """
    return field(default=default, metadata={"words": words, "kind": kind, **more})


def whole(least: int) -> Kind:
    """Return a kind of option that accepts integers of at least ``least``."""
    return Kind(f"a whole number of at least {least}", lambda value: WHOLE.fits(value) and value >= least)


def number(least: float, most: float = math.inf, above: bool = False) -> Kind:
    """Return a kind of option that accepts numbers from ``least`` to ``most``; ``above`` excludes ``least`` itself."""
    end = "" if most == math.inf else f" and at most {most:g}"
    return Kind(
        f"a number {'above' if above else 'of at least'} {least:g}{end}",
        lambda value: FINITE.fits(value) and (least < value if above else least <= value) and value <= most,
    )


def one_of(names: tuple[str, ...]) -> Kind:
    """Return a kind of option that accepts these names."""
    return Kind(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def check_options(options: Any) -> None:
    """Raise ArgumentError for a field with an invalid value."""
    for known in fields(options):
        known.metadata["kind"].check(known.name, getattr(options, known.name))


def changed_options(options: T, changes: Mapping[str, Any], what: str) -> T:
    """Return a copy with ``changes`` (values by option) applied; raise ArgumentError for an unknown option.

    ``what`` is the name of the options in the message.
    """
    known = [option.name for option in fields(options)]  # type: ignore[arg-type]
    for name in changes:
        if name not in known:
            raise ArgumentError(f"{what} has no option '{shown(name)}'{meant(name, known)}")
    return replace(options, **changes)  # type: ignore[type-var]

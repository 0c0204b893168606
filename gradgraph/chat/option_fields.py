"""Fields of dataclasses of options, each written once: with words for people, and what its values must be."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import field, fields, replace
from typing import Any, TypeVar

from gradgraph.errors import ArgumentError, shown, suggestion

Fits = tuple[Callable[[Any], bool], str]
T = TypeVar("T")

FLAG: Fits = (lambda value: isinstance(value, bool), "True or False")
TEXT: Fits = (lambda value: isinstance(value, str), "a text")
TEXTS: Fits = (
    lambda value: isinstance(value, tuple) and bool(value) and all(isinstance(name, str) for name in value),
    "names or globs",
)


def option(default: Any, words: str, fits: Callable[[Any], bool], expected: str, **more: Any) -> Any:
    """A field with a default.

    Args:
        words: what it is, for help and pages.
        fits: whether a value makes sense.
        expected: what a value should be, for messages.
        more: of the shell: ``flag``, another name; ``kind``, the type where the default is None; ``choices``;
            ``names``, the table of the names that it takes; ``suggested``, of such among others.
    """
    return field(default=default, metadata={"words": words, "fits": fits, "expected": expected, **more})


def whole(least: int) -> Fits:
    """Whole numbers of at least ``least``."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least, (
        f"a whole number of at least {least}"
    )


def number(least: float, most: float = math.inf, above: bool = False) -> Fits:
    """Finite numbers from ``least``, or above it, to ``most``."""

    def fits(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return is_number and (least < value if above else least <= value) and value <= most

    end = "" if most == math.inf else f" and at most {most:g}"
    return fits, f"a number {'above' if above else 'of at least'} {least:g}{end}"


def one_of(names: tuple[str, ...]) -> Fits:
    """One of these names."""
    return lambda value: value in names, f"one of {', '.join(names)}"


def or_none(kind: Fits) -> Fits:
    """A kind that takes what ``kind`` takes, or None."""
    return lambda value: value is None or kind[0](value), kind[1]


def check_options(options: Any) -> None:
    """Raise ArgumentError where a field has a value that makes no sense."""
    for known in fields(options):
        value = getattr(options, known.name)
        if not known.metadata["fits"](value):
            raise ArgumentError(f"{known.name} is {shown(repr(value))}; it should be {known.metadata['expected']}")


def changed_options(options: T, changes: Mapping[str, Any], what: str) -> T:
    """The same options with other values; raises ArgumentError where ``what`` has no such option."""
    known = [option.name for option in fields(options)]  # type: ignore[arg-type]
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ArgumentError(f"{what} has no option '{shown(name)}'{suggestion(name, near or known)}")
    return replace(options, **changes)  # type: ignore[type-var]

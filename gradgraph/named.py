"""Looking up what users name: a loss, an optimizer, tensors."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from gradgraph.arguments import TEXT, described
from gradgraph.errors import BuildError, shown, suggestion

T = TypeVar("T")


def make_named(kind: str, table: Mapping[str, Callable[..., T]], name: str, arguments: Mapping[str, Any]) -> T:
    """``table[name](**arguments)``.

    Raises:
        BuildError: there is no such name, or it has no such argument; the message suggests what was meant.
    """
    TEXT.check(f"the {kind}", name)
    make = table.get(name)
    if make is None:
        raise BuildError(f"there is no {kind} '{shown(name)}'{suggestion(name, table)}")
    known = inspect.signature(make).parameters
    for key in arguments:
        if key not in known:
            raise BuildError(f"the {kind} {name} has no argument '{shown(key)}'{suggestion(key, known)}")
    return make(**arguments)


def named_or_given(kind: str, given: Any, by_name: Callable[[str], T], wanted: type[T], example: str) -> T:
    """``given`` itself, or what it names; a function that was passed instead of its result is a common slip."""
    if isinstance(given, str):
        return by_name(given)
    if not isinstance(given, wanted):
        raise BuildError(f"the {kind} is {described(given)}; give a name, or call what makes one: {example}")
    return given


def as_names(names: str | Iterable[str]) -> list[str]:
    """One name as a list of it."""
    return [names] if isinstance(names, str) else list(names)


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """A name stands for itself, even if it holds brackets; anything else is a glob."""
    return [pattern] if pattern in names else fnmatch.filter(names, pattern)

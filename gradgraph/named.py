"""Looking up what users name: a loss, an optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gradgraph.arguments import TEXT
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

"""The kinds of walks, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from data_walks.random_walk import Walk

KINDS = ("tables", "pictures", "sounds", "texts", "estimators")


def walk_of(kind: str) -> Callable[[Walk], None]:
    """The function that makes a walk of a kind; what it needs is imported now."""
    found: Callable[[Walk], None] = getattr(importlib.import_module(f"data_walks.walk_{kind}"), f"walk_{kind}")
    return found

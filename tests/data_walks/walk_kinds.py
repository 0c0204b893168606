"""The kinds of walks, by name, and the seeds of each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from tests.data_walks.random_walk import Walk

# The seeds that tests run. Of 40 seeds, these alone take every branch of this folder that all 40 take (by coverage.py);
# chosen so for all kinds but tables, columns and classes. `python -m tests.data_walks` takes as many others as you
# want.
SEEDS: dict[str, Sequence[int]] = {
    "tables": range(25),
    "columns": range(30),
    "pictures": (0, 1, 4, 8, 11, 14, 19, 21, 25, 31, 33, 34),
    "sounds": (5, 19, 23, 26, 27, 30, 31),
    "texts": (1, 2, 5, 7, 9, 11, 34, 36),
    "classes": range(100),
    "estimators": (1, 8, 11, 13, 15, 22, 23, 24, 33, 36),
}
KINDS = tuple(SEEDS)


def walk_of(kind: str) -> Callable[[Walk], None]:
    """The function that makes a walk of a kind; what it needs is imported now."""
    found: Callable[[Walk], None] = getattr(importlib.import_module(f"tests.data_walks.walk_{kind}"), f"walk_{kind}")
    return found

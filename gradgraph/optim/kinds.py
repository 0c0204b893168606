"""The kinds of values that optimizers take as arguments."""

from __future__ import annotations

from typing import Any

from gradgraph.arguments import NUMBER, Kind
from gradgraph.optim.schedules import Schedule


def _are_two_numbers(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(NUMBER.fits, value))


RATE = Kind("a number, or a schedule such as gradgraph.optim.cosine(1e-3, 1000)",
            lambda value: isinstance(value, Schedule) or NUMBER.fits(value))  # fmt: skip
PAIR = Kind("two numbers, such as (0.9, 0.999)", _are_two_numbers)

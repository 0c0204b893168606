"""Conversion of the first factor of an adapter of a grouped Conv to and from PEFT, which has no groups."""

from __future__ import annotations

import numpy as np

from gradgraph.surgery.operation import Array


def spread(array: Array, groups: int) -> Array:
    """Return a factor (rank, inputs of a group, …) as (rank, all inputs, …), with zeros outside each group."""
    rank, inputs = array.shape[:2]
    whole = np.zeros((rank, inputs * groups, *array.shape[2:]), array.dtype)
    for rows, columns in _own_parts(rank, inputs, groups):
        whole[rows, columns] = array[rows]
    return whole


def gathered(array: Array, groups: int) -> Array | None:
    """Return a factor (rank, all inputs, …) as (rank, inputs of a group, …), the inverse of ``spread``.

    Returns None if a group uses inputs of other groups, as in adapters trained in PEFT.
    """
    rank, inputs = len(array), array.shape[1] // groups
    parts = np.zeros((rank, inputs, *array.shape[2:]), array.dtype)
    for rows, columns in _own_parts(rank, inputs, groups):
        parts[rows] = array[rows, columns]
    return parts if np.array_equal(spread(parts, groups), array) else None


def _own_parts(rank: int, inputs: int, groups: int) -> list[tuple[slice, slice]]:
    each = rank // groups
    return [(slice(g * each, (g + 1) * each), slice(g * inputs, (g + 1) * inputs)) for g in range(groups)]

"""Units of an input: the parts of a sample that are shown, deleted and inserted as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gradgraph.data.arrays.batch import Array
from gradgraph.data.images.image_form import MODES
from gradgraph.data.preprocess.column_kinds import Category
from gradgraph.data.record.data_names import DataNames
from gradgraph.errors import DataError, shown

Shown = Literal["picture", "tokens", "columns", "sound", "values"]
SECTIONS = 200  # of a sound: about the number of bars that a page can show


@dataclass(frozen=True)
class Units:
    """The units of an input.

    Attributes:
        shown: how attributions to the input are drawn.
        index: the unit of each element of a sample, in the shape of a sample.
        names: the names of the units; empty for pixels, tokens and sections of a sound.
        replacement: the values of a deleted element; its shape broadcasts to that of a sample.
        size: height and width of a picture.
    """

    shown: Shown
    index: Array
    replacement: Array
    names: Sequence[str] = ()
    size: tuple[int, int] = (0, 0)

    @property
    def count(self) -> int:
        """The number of units."""
        return int(self.index.max(initial=-1)) + 1

    def sums(self, name: str, attributions: Array) -> Array:
        """Return the attributions summed by unit: float64 [samples, units].

        Args:
            name: the name of the input.
            attributions: [samples, …] in the shape of the input; for tokens also [samples, tokens, width] (by
                embedding), and for pictures also a map [samples, 1, height, width] of any size.

        Raises:
            DataError: if the attributions have another shape.
        """
        found, shape = attributions.astype(np.float64), self.index.shape
        if self.shown == "picture" and found.ndim == 4 and found.shape[1] == 1 and found.shape[1:] != shape:
            rows, columns = (np.arange(n) * m // n for n, m in zip(self.size, found.shape[2:], strict=True))
            return found[:, 0][:, rows[:, None], columns].reshape(len(found), -1)
        if found.ndim == len(shape) + 2:
            found = found.sum(axis=-1)
        if found.shape[1:] != shape:
            raise DataError(
                f"the attributions to '{shown(name)}' have the shape {list(attributions.shape[1:])} per sample, but "
                f"the input has {list(shape)}, so they cannot be shown; choose another method, or explain it in "
                "Python"
            )
        flat = self.index.reshape(-1)
        return np.stack([np.bincount(flat, row.reshape(-1), self.count) for row in found])

    def deleted(self, x: Array, gone: Array) -> Array:
        """Return the samples ``x`` without the units in ``gone``, bool [samples, units]."""
        made: Array = np.where(gone[:, self.index], self.replacement, x).astype(x.dtype)
        return made


def units_of(name: str, x: Array, names: DataNames, base: float | Array = 0.0, blank: int = 0) -> Units:
    """Return the units of an input, by the record of the data if it has one, otherwise by shape.

    Args:
        name: the name of the input.
        x: its values, [samples, …].
        names: the record of the model's data.
        base: the value of a deleted number, or an array of them in the shape of a sample.
        blank: the index of a deleted token.
    """
    shape, zero, columns = x.shape[1:], np.asarray(base), dict(_columns(name, names))
    if name in names.texts or (x.dtype.kind in "iu" and len(shape) == 1 and not columns):
        return Units("tokens", np.arange(math.prod(shape)).reshape(shape), np.full((), blank))
    if name in names.sounds:
        length = shape[-1]
        sections = np.arange(length) * min(SECTIONS, length) // length
        return Units("sound", np.broadcast_to(sections, shape), zero)
    if len(shape) == 3 and (name in names.images or shape[0] in MODES or shape[2] in MODES):
        last = names.images.get(name, {}).get("layout") == "NHWC" or (shape[0] not in MODES and shape[2] in MODES)
        size = shape[:2] if last else shape[1:]
        pixels = np.arange(math.prod(size)).reshape(size)
        return Units("picture", np.broadcast_to(pixels[..., None] if last else pixels, shape), zero, size=size)
    if columns and len(shape) == 1 and sum(len(blanks) for blanks in columns.values()) == shape[0]:
        index = np.repeat(np.arange(len(columns)), [len(blanks) for blanks in columns.values()])
        given = [b for each in columns.values() for b in each]
        blanks = np.array([own if b is None else b for own, b in zip(np.broadcast_to(zero, shape), given, strict=True)])
        return Units("columns", index, blanks, list(columns))
    places = [", ".join(map(str, place)) for place in np.ndindex(*shape)]
    return Units("columns" if len(shape) < 2 else "values", np.arange(len(places)).reshape(shape), zero,
                 [f"{name}[{place}]" if place else name for place in places])  # fmt: skip


def _columns(name: str, names: DataNames) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the columns of an input, and for each feature of a column the value that deletes it (None for the base)."""
    plan = names.preprocess
    if plan is None or name not in plan.features:
        yield from ((column, [None]) for column in names.columns.get(name, ()))
        return
    for column, kind in plan.read.items():
        if name == (plan.indices if kind.is_index else plan.numbers):
            unseen = len(kind.slots) - 1 if isinstance(kind, Category) and kind.is_index else None
            yield column, [unseen] * len(kind.parts)


def joined(sums: Mapping[str, Array]) -> Array:
    """Return the attributions by unit of all inputs side by side: [samples, units]."""
    return np.concatenate(list(sums.values()), axis=1)

"""A kind of column: plain data learned from a training table, and the nodes that turn it into numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gradgraph.errors import ArgumentError, DataError, shown
from gradgraph.preprocess.frames import Array, column_text

if TYPE_CHECKING:
    from gradgraph.graph.builder import Builder, Var


@dataclass(frozen=True, kw_only=True)
class ColumnKind:
    """A kind of column.

    Attributes:
        name: in overrides, in help and in files.
        takes_text: the model reads the column as text, or else as float64.
        is_index: it gives int64 numbers of categories, or else float32.
        gaps: the share of training rows whose value is missing.
    """

    name: ClassVar[str]
    takes_text = False
    is_index = False
    gaps: float = 0.0

    @property
    def parts(self) -> list[str]:
        """Words for each number that is made."""
        raise NotImplementedError

    @property
    def has_gaps(self) -> bool:
        """Whether training data have gaps, so that a number of its own says where they are."""
        return self.gaps > 0

    def read(self, column: str, values: Array) -> Array:
        """A column as the nodes read it: text [rows], or float64 [rows].

        Raises:
            DataError: it holds what training data of this kind cannot hold; with the row.
        """
        return column_text(column, values)

    def write(self, op: Builder, x: Var) -> Var:
        """Emit nodes: [rows], text or float64, to [rows, width]."""
        raise NotImplementedError

    def draw(self, rng: np.random.Generator, rows: int) -> Array:
        """A column, as the nodes read it, with gaps and values that training data lack: text, or float64."""
        raise NotImplementedError

    def unseen(self, values: Array) -> Array:
        """Which values of a column, as :meth:`read` returns it, are none that training data have, nor near one."""
        return np.zeros(len(values), bool)

    @property
    def range(self) -> str:
        """The values of training data, in a few words; none where nothing is known of them."""
        return ""

    @property
    def others(self) -> float:
        """The share of training rows that :meth:`unseen` is true for."""
        return 0.0

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"kind": self.name, **{k: list(v) if isinstance(v, tuple) else v for k, v in own.items()}}

    def check(self, *fits: bool) -> None:
        """Raise ArgumentError unless all is as ``learn`` makes it."""
        if not (all(fits) and is_share(self.gaps)):
            raise ArgumentError(f"a column of the kind {self.name} has values that it cannot have")


def missing(values: Array) -> Array:
    """Which values of a column, as a kind reads it, are missing."""
    found: Array = values == "" if values.dtype.kind == "O" else np.isnan(values)
    return found.astype(bool)


def share(chosen: Array) -> float:
    """The share of rows that are chosen."""
    return float(chosen.mean()) if len(chosen) else 0.0


def is_number(value: Any) -> bool:
    """Whether it is a finite number, as plain data may hold."""
    return type(value) in (int, float) and -1e308 < value < 1e308


def is_share(value: Any) -> bool:
    """Whether it is a number from 0 to 1."""
    return is_number(value) and 0 <= value <= 1


def centre(name: str, values: Array) -> tuple[float, float]:
    """Mean and standard deviation of the numbers that are there, such that they can be taken off and divided by."""
    there = values[~np.isnan(values)]
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = (float(there.mean()), float(there.std())) if there.size else (0.0, 1.0)
    if not (math.isfinite(mean) and math.isfinite(std)):
        raise DataError(f"the column '{shown(name)}' holds infinite numbers, or too large ones; correct them")
    return mean, std if std > 1e-14 * abs(mean) else 1.0


def ends(values: Array) -> tuple[float, float]:
    """The least and the largest of the numbers that are there; 0 where there are none."""
    there = values[~np.isnan(values)]
    return (float(there.min()), float(there.max())) if there.size else (0.0, 0.0)


def far_outside(values: Array, low: float, high: float) -> Array:
    """Which numbers are below ``low`` or above ``high`` by more than half of the range between these."""
    reach = (high / 2 - low / 2) + 1e-9 * max(abs(low), abs(high))
    with np.errstate(invalid="ignore"):
        found: Array = (values < low - reach) | (values > high + reach)
    return found

"""The base class of column kinds: parameters learnt from a training table, and the nodes that apply them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gradgraph.data.preprocess.frames import Array, column_text
from gradgraph.errors import ArgumentError, DataError, shown

if TYPE_CHECKING:
    from gradgraph.graph.builder import Builder, Var


@dataclass(frozen=True, kw_only=True)
class ColumnKind:
    """The base class of column kinds: a conversion of a column to features, with parameters learnt from training data.

    Attributes:
        name: the kind's name in overrides, help and files.
        takes_text: whether the model reads the column as text; otherwise as float64.
        is_index: whether the features are int64 category indices; otherwise they are float32.
        indicator: whether an additional feature marks missing values, if training data have some.
        gaps: the fraction of training rows whose value is missing.
    """

    name: ClassVar[str]
    takes_text = False
    is_index = False
    indicator = True
    gaps: float = 0.0

    @property
    def parts(self) -> list[str]:
        """The suffix that describes each output feature, to be appended to the column's name."""
        raise NotImplementedError

    @property
    def has_gaps(self) -> bool:
        """Whether training data have missing values."""
        return self.gaps > 0

    @property
    def marks_gaps(self) -> bool:
        """Whether an additional feature marks missing values."""
        return self.has_gaps and self.indicator

    def read(self, column: str, values: Array) -> Array:
        """Return a column in the form that the nodes read: text [rows], or float64 [rows].

        Raises:
            DataError: the column contains a value that is invalid for this kind; the message names the row.
        """
        return column_text(column, values)

    def write(self, op: Builder, x: Var) -> Var:
        """Emit nodes that convert a column ``x``, text or float64 [rows], to features [rows, width]."""
        raise NotImplementedError

    def draw(self, rng: np.random.Generator, rows: int) -> Array:
        """Return a random column in the form of :meth:`read`, including missing and unseen values."""
        raise NotImplementedError

    def unseen(self, values: Array) -> Array:
        """Return whether each value, as returned by :meth:`read`, is a new category or far from the training data."""
        return np.zeros(len(values), bool)

    @property
    def range(self) -> str:
        """A short text about the values in the training data, such as their range; empty if unknown."""
        return ""

    @property
    def others(self) -> float:
        """The fraction of training rows for which :meth:`unseen` is true."""
        return 0.0

    def as_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"kind": self.name, **{k: list(v) if isinstance(v, tuple) else v for k, v in own.items()}}

    def check(self, *fits: bool) -> None:
        """Raise ArgumentError unless all conditions in ``fits`` are true and ``gaps`` is a fraction."""
        if not (all(fits) and is_share(self.gaps)):
            raise ArgumentError(f"a column of the kind {self.name} has invalid parameters")


def missing(values: Array) -> Array:
    """Return whether each value of a column, as returned by :meth:`ColumnKind.read`, is missing."""
    found: Array = values == "" if values.dtype.kind == "O" else np.isnan(values)
    return found.astype(bool)


def share(chosen: Array) -> float:
    """Return the fraction of true values in a bool array; 0 if it is empty."""
    return float(chosen.mean()) if len(chosen) else 0.0


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite int or float (not a bool)."""
    return type(value) in (int, float) and -1e308 < value < 1e308


def is_share(value: Any) -> bool:
    """Whether ``value`` is a number from 0 to 1."""
    return is_number(value) and 0 <= value <= 1


def centre(name: str, values: Array) -> tuple[float, float]:
    """Return the mean and the standard deviation of the values that are not NaN.

    The standard deviation is 1 if all values are equal.

    Raises:
        DataError: a value is infinite, or so large that the computation overflows.
    """
    there = values[~np.isnan(values)]
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = (float(there.mean()), float(there.std())) if there.size else (0.0, 1.0)
    if not (math.isfinite(mean) and math.isfinite(std)):
        raise DataError(f"the column '{shown(name)}' contains infinite or too large numbers; correct them")
    return mean, std if std > 1e-14 * abs(mean) else 1.0


def ends(values: Array) -> tuple[float, float]:
    """Return the minimum and the maximum of the values that are not NaN; 0 and 0 if all are NaN."""
    there = values[~np.isnan(values)]
    return (float(there.min()), float(there.max())) if there.size else (0.0, 0.0)


def far_outside(values: Array, low: float, high: float) -> Array:
    """Return whether each value is outside ``low`` to ``high`` by more than half of that range."""
    reach = (high / 2 - low / 2) + 1e-9 * max(abs(low), abs(high))
    with np.errstate(invalid="ignore"):
        found: Array = (values < low - reach) | (values > high + reach)
    return found

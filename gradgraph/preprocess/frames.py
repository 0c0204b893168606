"""The columns of tables as arrays of numbers or of text: data frames of pandas and polars, Arrow tables, dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gradgraph.errors import DataError, shown

Array = np.ndarray[Any, Any]

_GAPS = ("NAType", "NaTType")  # of pandas; they are no numbers, and equal to nothing


def is_table(data: Any) -> bool:
    """Is it a DataFrame of pandas or polars, or an Arrow table?"""
    if hasattr(data, "column_names") and hasattr(data, "to_pydict"):
        return True
    return hasattr(data, "columns") and hasattr(data, "to_numpy") and hasattr(data, "__getitem__")


class Frame:
    """A table, or a dict of columns, by the names of its columns.

    Attributes:
        keys: what the table itself calls each column, which need not be text, by its name.

    Raises:
        DataError: two have one name.
    """

    def __init__(self, table: Any) -> None:
        is_arrow = hasattr(table, "column_names") and hasattr(table, "to_pydict")
        every = list(table if isinstance(table, Mapping) else table.column_names if is_arrow else table.columns)
        self._table, self.keys = table, {str(key): key for key in every}
        if len(self.keys) < len(every):
            names = [str(key) for key in every]
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"the table has two columns '{shown(twice)}'; give each a name of its own")

    def __contains__(self, name: str) -> bool:
        return name in self.keys

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)

    def __getitem__(self, name: str) -> Array:
        """A column as the library gives it."""
        column = self._table[self.keys[name]]
        return np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)


def is_text(value: Any) -> bool:
    """Whether it is text that UTF-8 can say."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def is_gap(value: Any) -> bool:
    """Is it what stands for a missing value: None, NaN, NaT, NA?"""
    return value is None or type(value).__name__ in _GAPS or (isinstance(value, float | np.floating) and value != value)


def text_of(values: Array) -> Array:
    """A column as text [rows], of dtype object: dates in ISO form, whole numbers without a point, gaps as ""."""
    if values.dtype.kind == "M":
        texts = np.datetime_as_string(values.astype("datetime64[s]")).astype(object)
        texts[np.isnat(values)] = ""
        return texts
    found = ("" if is_gap(value) else _text(value) for value in values.tolist())
    return np.fromiter(found, object, len(values))


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else str(value)


def are_numbers(values: Array) -> bool:
    """Does a column hold numbers, or nothing else but gaps? Of text, none is one."""
    if values.dtype.kind != "O":
        return values.dtype.kind in "biufm"
    kinds = {type(value) for value in values.tolist() if not is_gap(value)}
    return bool(kinds) and all(issubclass(kind, bool | int | float | np.number) or kind.__name__ == "Decimal"
                               for kind in kinds)  # fmt: skip


def numbers_of(name: str, values: Array) -> Array:
    """A column as float64 [rows], with NaN for gaps; times that pass are seconds.

    Raises:
        DataError: it holds something else.
    """
    if values.dtype.kind == "m":
        seconds = values.astype("timedelta64[us]").astype(np.float64) / 1e6
        return np.where(np.isnat(values), np.nan, seconds)
    if values.dtype.kind in "biuf":
        return values.astype(np.float64)
    found = np.full(len(values), np.nan)
    for row, value in enumerate(values.tolist()):
        if is_gap(value) or value == "":
            continue
        try:
            found[row] = float(value)
        except (TypeError, ValueError, OverflowError):
            raise DataError(
                f"the column '{shown(name)}' holds {shown(repr(value))} in row {row}, where the model takes numbers; "
                "correct it, or leave it empty"
            ) from None
    return found

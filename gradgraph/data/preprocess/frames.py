"""Table columns as arrays, from pandas and polars data frames, Arrow tables and dicts of columns.

This module defines missing values, for every kind of table and for exported models.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import numpy as np

from gradgraph.errors import DataError, row_at, shown

Array = np.ndarray[Any, Any]

# cells that pandas.read_csv treats as missing
GAP_WORDS = ("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A",
             "NA", "NULL", "NaN", "None", "n/a", "nan", "null")  # fmt: skip
DAYS = np.dtype("datetime64[D]")
EXACT = 2**53  # above it, float64 skips integers
_GAPS = ("NAType", "NaTType")  # type names of pandas' missing values other than None and NaN
_IS_GAP = frozenset(GAP_WORDS)
_NESTED = (list, tuple, dict, set, np.ndarray)
# durations as pandas and Python print them: -1 days +23:00:00 is minus one hour
_DURATION = re.compile(
    r"(?:([+-]?[0-9]{1,6}) days?,? )?([+-]?)([0-9]{1,6}):([0-5][0-9]):([0-5][0-9](?:[.][0-9]+)?)", re.ASCII
)


def is_table(data: Any) -> bool:
    """Whether ``data`` is a pandas or polars DataFrame, an Arrow table, or a Frame."""
    if hasattr(data, "column_names") and hasattr(data, "to_pydict"):
        return True
    if isinstance(data, Frame):
        return True
    return hasattr(data, "columns") and hasattr(data, "to_numpy") and hasattr(data, "__getitem__")


def is_column(value: Any) -> bool:
    """Whether ``value`` is a single column of pandas, polars or Arrow."""
    if is_table(value):
        return False
    return hasattr(value, "to_pylist") or (hasattr(value, "to_numpy") and len(getattr(value, "shape", ())) == 1)


def array_of(name: str, column: Any) -> Array:
    """Convert a column that was passed separately from its table to an array; numbers have a numeric dtype."""
    return with_numbers(name, Frame({name: column})[name])


class Frame:
    """A table, or a dict of columns, indexed by column name.

    Attributes:
        keys: column name → the table's own key, which need not be a string.

    Raises:
        DataError: two columns have the same name.
    """

    keys: dict[str, Any]
    _table: Any

    def __init__(self, table: Any) -> None:
        if isinstance(table, Frame):
            self._table, self.keys = table._table, table.keys
            return
        is_arrow = hasattr(table, "column_names") and hasattr(table, "to_pydict")
        every = list(table if isinstance(table, Mapping) else table.column_names if is_arrow else table.columns)
        self._table, self.keys = table, {str(key): key for key in every}
        if len(self.keys) < len(every):
            names = [str(key) for key in every]
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"the table has two columns '{shown(twice)}'; rename one of them")

    def __contains__(self, name: str) -> bool:
        return name in self.keys

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)

    def __getitem__(self, name: str) -> Array:
        """Return a column [rows] as its library converts it.

        Integers with missing values, Decimals and dates with a time zone have dtype object.
        """
        values = _values(self._table[self.keys[name]])
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim != 1:
            raise DataError(
                f"the column '{shown(name)}' has shape {list(values.shape)}; provide one value per row of the table"
            )
        return _without_decimals(_decoded(name, values))

    def with_column(self, name: str, values: Any) -> Frame:
        """Return a table with this column added or replaced."""
        return Frame({**{one: self._table[key] for one, key in self.keys.items()}, name: values})


def _values(column: Any) -> Array:
    if isinstance(column, list | tuple):
        plain = np.asarray(column) if all(np.ndim(value) == 0 for value in column) else np.zeros(0, "U")
        is_mixed = plain.dtype.kind in "fUS" and not all(isinstance(value, float) for value in column)
        return _objects(column) if is_mixed else plain
    column = _of_arrow(column)
    kind = getattr(column, "dtype", getattr(column, "type", None))  # Arrow
    kind = getattr(getattr(kind, "categories", None), "dtype", kind)  # pandas
    whole = not isinstance(kind, np.dtype) and str(kind).lower().startswith(("int", "uint")) and _has_gaps(column)
    as_list = next((how for how in ("to_pylist", "to_list", "tolist") if hasattr(column, how)), None)
    zone, parts = getattr(kind, "tz", getattr(kind, "time_zone", None)), getattr(kind, "fields", None)
    if as_list is not None and (whole or zone is not None or parts):
        return _objects(getattr(column, as_list)())  # NumPy would convert to floats, drop the zone, or join the parts
    return np.asarray(column if hasattr(column, "to_pylist") or not hasattr(column, "to_numpy") else column.to_numpy())


def _of_arrow(column: Any) -> Any:
    """Return an Arrow column, also one in a pandas column, without its dictionary; other columns are unchanged.

    Arrow's ``to_numpy`` replaces missing values of a dictionary with other values, and loses time zones.
    """
    if hasattr(getattr(column, "dtype", None), "pyarrow_dtype"):
        column = getattr(column, "array", column).__arrow_array__()
    if hasattr(getattr(column, "type", None), "index_type"):
        column = column.cast(column.type.value_type)
    is_of_pandas = str(getattr(getattr(column, "type", None), "extension_name", "")).startswith("pandas.")
    return column.to_pandas() if is_of_pandas else column  # periods and intervals


def _without_decimals(values: Array) -> Array:
    """Return a column with Decimals as integers if all are whole, otherwise as floats."""
    if values.dtype.kind != "O" or not any(type(value) is Decimal for value in values.tolist()):
        return values
    is_whole = all(type(v) is not Decimal or (v.is_finite() and v == int(v)) for v in values.tolist())
    convert = int if is_whole else float
    return _objects([convert(value) if type(value) is Decimal else value for value in values.tolist()])


def _decoded(name: str, values: Array) -> Array:
    """Return a column with bytes decoded as text; raise DataError for invalid UTF-8."""
    if values.dtype.kind != "S" and not (values.dtype.kind == "O" and any(type(v) is bytes for v in values.tolist())):
        return values
    try:
        return _objects([value.decode() if isinstance(value, bytes) else value for value in values.tolist()])
    except UnicodeDecodeError as error:
        raise DataError(
            f"the column '{shown(name)}' contains the bytes {shown(repr(error.object))}, which are not UTF-8; convert "
            "them to text"
        ) from None


def _has_gaps(column: Any) -> bool:
    nulls = getattr(column, "null_count", None)  # a number in Arrow, a function in polars
    if nulls is not None:
        return bool(nulls() if callable(nulls) else nulls)
    return hasattr(column, "isna") and bool(column.isna().any())


def _objects(values: Any) -> Array:
    return np.fromiter(values, object, len(values))


def is_text(value: Any) -> bool:
    """Whether ``value`` is a string that UTF-8 can encode, without unpaired surrogates, as file names may have."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def is_gap(value: Any) -> bool:
    """Whether ``value`` is a missing value: None, NaN, NaT or NA."""
    return value is None or type(value).__name__ in _GAPS or (isinstance(value, float | np.floating) and value != value)


def text_of(values: Array) -> Array:
    """Return a column as text, dtype object [rows].

    Dates are in ISO format, integers without a decimal point, and missing values "".
    """
    if values.dtype.kind == "M":
        texts = np.datetime_as_string(values, "D" if values.dtype == DAYS else "s", casting="unsafe").astype(object)
        texts[np.isnat(values)] = ""
        return texts
    values = values.astype("timedelta64[us]") if values.dtype.kind == "m" else values  # as ns, .tolist() has integers
    found = ("" if is_gap(value) else _text(value) for value in values.tolist())
    return np.fromiter(found, object, len(values))


def column_text(name: str, values: Array) -> Array:
    """Return a text column as models read it: as :func:`text_of`, with GAP_WORDS also replaced by "".

    Raises:
        DataError: the column contains lists or dicts, or floats too large to represent every integer.
    """
    check_cells(f"the column '{shown(name)}'", values)
    if values.dtype.kind in "fO":
        for row, value in enumerate(values.tolist()):
            if isinstance(value, float) and abs(value) >= EXACT and value - value == 0:
                raise DataError(
                    f"the column '{shown(name)}' contains {value:.17g} in {row_at(row)} as a float, but floats "
                    "cannot tell integers above 2**53 apart; provide the column as integers or as text"
                )
    texts = text_of(values)
    return np.fromiter(("" if text in _IS_GAP else text for text in texts.tolist()), object, len(texts))


def _text(value: Any) -> str:
    if isinstance(value, datetime.datetime):
        return value.isoformat(timespec="seconds")
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < EXACT else str(value)


def check_cells(where: str, values: Array) -> None:
    """Raise DataError, naming the row, for a value that is a list, a dict or an array."""
    if values.dtype.kind in "OV":
        for row, value in enumerate(values.tolist()):
            if isinstance(value, _NESTED):
                raise DataError(
                    f"{where} contains {shown(repr(value))} in {row_at(row)}, but each value must be one number, "
                    "text or date; split it into several columns, or drop it"
                )


def are_numbers(values: Array) -> bool:
    """Whether a column contains only numbers and missing values; text does not count."""
    if values.dtype.kind != "O":
        return values.dtype.kind in "biufm"
    kinds = {type(value) for value in values.tolist() if not is_gap(value)}
    numbers = all(issubclass(kind, bool | int | float | np.number | Decimal) for kind in kinds)
    return bool(kinds) and (numbers or are_durations(values))


def as_typed(values: Array) -> Array:
    """Convert an object column of only booleans or only integers to that dtype; keep others."""
    if values.dtype.kind != "O" or not len(values):
        return values
    every = values.tolist()
    if all(isinstance(value, bool | np.bool_) for value in every):
        return values.astype(bool)
    if (
        are_numbers(values)
        and not any(map(is_gap, every))
        and not any(isinstance(v, float | np.floating) for v in every)
    ):
        try:
            if all(int(value) == value for value in every):
                return np.array([int(value) for value in every], np.int64)
        except (OverflowError, ValueError):
            return values
    return values


def with_numbers(name: str, values: Array) -> Array:
    """Convert an object column of numbers and missing values to a numeric dtype; others are returned unchanged."""
    values = as_typed(values)
    is_plain = values.dtype.kind == "O" and are_numbers(values) and not are_durations(values)
    if is_plain and not any(isinstance(value, bool | np.bool_) for value in values.tolist()):
        return numbers_of(name, values)
    return values


def are_dates(values: Array) -> bool:
    """Whether a column contains only dates and missing values, by type."""
    if values.dtype.kind != "O":
        return bool(values.dtype.kind == "M")
    there = [value for value in values.tolist() if not is_gap(value)]
    return bool(there) and all(isinstance(value, datetime.date) for value in there)


def are_durations(values: Array) -> bool:
    """Whether a column contains only durations or times of the day, and missing values, by type."""
    if values.dtype.kind != "O":
        return bool(values.dtype.kind == "m")
    there = [value for value in values.tolist() if not is_gap(value)]
    return bool(there) and all(isinstance(value, datetime.timedelta | datetime.time) for value in there)


def durations_in(values: Array) -> Array | None:
    """Convert a text column of durations (``1:02:03.5``, ``2 days 03:00:00``) to seconds; None for any other column."""
    if values.dtype.kind not in "OUT":
        return None
    found = [_seconds(value) for value in values.tolist()]
    if None in found or all(seconds != seconds for seconds in found):
        return None
    return np.array(found, np.float64)


def _seconds(value: Any) -> float | None:
    """Parse a duration and return its seconds: NaN for a missing value, None for anything else."""
    if is_gap(value) or (isinstance(value, str) and value in _IS_GAP):
        return math.nan
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    days, sign, hours, minutes, rest = found.groups()
    part = int(hours) * 3600 + int(minutes) * 60 + float(rest)
    return int(days or 0) * 86400 + (-part if sign == "-" else part)


def _seconds_of(value: datetime.timedelta | datetime.time) -> float:
    """Return the seconds of a duration, or since midnight."""
    if isinstance(value, datetime.time):
        return value.hour * 3600 + value.minute * 60 + value.second + value.microsecond / 1e6
    return value.total_seconds()


def check_durations(name: str, values: Array) -> None:
    """Raise DataError, naming the row, for text that is not a duration."""
    if values.dtype.kind in "OUT":
        for row, value in enumerate(values.tolist()):
            if isinstance(value, str) and _seconds(value) is None:
                raise DataError(
                    f"the column '{shown(name)}' contains {shown(repr(value))} in {row_at(row)}, but in the training "
                    "data it has durations such as 1:02:03; correct it, or leave it empty"
                )


def numbers_of(name: str, values: Array) -> Array:
    """Return a column as float64 [rows], with NaN for missing values and seconds for durations.

    Raises:
        DataError: a value is not a number, is infinite, or is an integer that float64 cannot represent.
    """
    if values.dtype.kind == "m":
        seconds = values.astype("timedelta64[us]").astype(np.float64) / 1e6
        return np.where(np.isnat(values), np.nan, seconds)
    if values.dtype.kind == "O" and are_durations(values):
        return np.array([np.nan if is_gap(value) else _seconds_of(value) for value in values.tolist()])
    if values.dtype.kind in "biuf":
        found = values.astype(np.float64)
    else:
        found = np.full(len(values), np.nan)
        # .tolist() returns dates for microseconds, but integers for nanoseconds
        as_dates = values.astype("datetime64[us]") if values.dtype.kind == "M" else values
        for row, value in enumerate(as_dates.tolist()):
            if not (is_gap(value) or (isinstance(value, str) and value in _IS_GAP)):
                found[row] = _number(name, value, row)
    if np.isinf(found).any():
        raise _no_number(name, values[np.isinf(found)].tolist()[0], int(np.isinf(found).argmax()))
    _check_apart(name, values, found)
    return found


def _number(name: str, value: Any, row: int) -> float:
    if not isinstance(value, datetime.date) and not (isinstance(value, str) and "_" in value):
        try:
            number = float(value)
            if number - number == 0 or not isinstance(value, str):
                return number
        except (TypeError, ValueError, OverflowError):
            pass
    raise _no_number(name, value, row)


def _no_number(name: str, value: Any, row: int) -> DataError:
    given = value if isinstance(value, float) else repr(value)
    return DataError(
        f"the column '{shown(name)}' contains {shown(given)} in {row_at(row)}, but the model expects "
        f"{'finite ' if isinstance(value, float) else ''}numbers; correct it, or leave it empty"
    )


def _check_apart(name: str, values: Array, found: Array) -> None:
    """Raise DataError if two different integers in ``values`` become the same float in ``found``."""
    if values.dtype.kind not in "iuO" or not (np.abs(found) >= EXACT).any():
        return
    held: dict[float, int] = {}
    for row, (value, number) in enumerate(zip(values.tolist(), found.tolist(), strict=True)):
        if isinstance(value, int) and abs(value) >= EXACT and held.setdefault(number, value) != value:
            raise DataError(
                f"the column '{shown(name)}' contains {value} in {row_at(row)}, which float64 cannot tell apart "
                f"from {held[number]}",
                remedy=f"if these are ids, use kinds={{'{shown(name)}': 'category'}}, or 'drop'",
                shell=f"if these are ids, use --column {shown(name)}=category, or {shown(name)}=drop",
            )

"""Readers of untrusted JSON, TOML and CSV, and type-checked access to the fields of their tables."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar

from gradgraph.errors import listed, shown
from gradgraph.files.untrusted.regular import UnreadableError, reason_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

LARGEST = 32 << 20  # bytes of a document: parsed, it takes up to 25 times as many
LARGEST_NUMBER = 1e18
LARGEST_COUNT = 1 << 53  # integers up to it are exact in every reader of JSON
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# a TOML key of 32 parts: the parser takes quadratic time in the parts
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){32}""", re.ASCII)


class KeyTwiceError(UnreadableError):
    """Raised for a duplicate key in a table."""


def json_of(content: str | bytes, finite: bool = True, largest: int = LARGEST) -> Any:
    """Return the value of a JSON document.

    Args:
        content: text, or UTF-8.
        finite: reject NaN and Infinity (not JSON), and numbers beyond float64.
        largest: the maximum size in bytes.

    Raises:
        UnreadableError: if the content is not JSON, is larger than ``largest``, is nested too deeply for Python, or has
            numbers of thousands of digits, duplicate keys or lone surrogates.
    """
    with _reading():
        text = _decoded(content, largest)
        constant, number = (_no_constant, _finite) if finite else (None, None)
        value = json.loads(text, object_pairs_hook=_table, parse_constant=constant, parse_float=number)
        if _SURROGATE.search(text):
            _check_characters(value)
        return value


def toml_of(content: bytes) -> dict[str, Any]:
    """Return the tables of a TOML document.

    Raises:
        UnreadableError: if the content is not TOML, is larger than LARGEST, is nested too deeply for Python, or has
            keys of 32 parts.
    """
    with _reading():
        text = _decoded(content)
        if _LONG_KEY.search(text):
            raise UnreadableError("a key has too many parts")
        return tomllib.loads(text)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Return a context that converts ValueError and RecursionError to UnreadableError."""
    try:
        yield
    except UnreadableError:
        raise
    except RecursionError:
        raise UnreadableError("it is nested too deeply") from None
    except ValueError as error:
        raise UnreadableError(reason_of(error)) from None


def csv_rows(text: str) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns of a CSV table with a header, and its rows as cells by column; extra cells are dropped.

    Raises:
        UnreadableError: if a line has a zero byte, or a cell of more than 128 KiB.
    """
    try:
        rows = csv.reader(io.StringIO(text, newline=""))
        columns = next(rows, [])
        return columns, [dict(zip(columns, row, strict=False)) for row in rows if row]
    except csv.Error as error:
        raise UnreadableError(reason_of(error)) from None


def csv_columns(file: BinaryIO, separator: str = ",") -> list[str]:
    """Return the column names in the header of a CSV table; empty if the file is not CSV.

    Only the header is read. It may span several lines if names are quoted, and have up to LARGEST bytes.
    """
    try:
        rows = csv.reader(_lines(file), delimiter=separator)
        return next((row for row in rows if any(cell.strip() for cell in row)), [])
    except csv.Error:
        return []


def odd_csv_row(file: BinaryIO, separator: str = ",") -> tuple[int, int, int] | None:
    """Return (line, cells, columns) for the first row whose number of cells differs from the number of columns.

    The line is the last one of the row, counted from 1. None if there is no such row, or the file is not CSV.
    """
    text = io.TextIOWrapper(file, "utf-8-sig", "replace", newline="")
    try:
        reader = csv.reader(text, delimiter=separator)
        rows = (row for row in reader if row)
        columns = len(next(rows, []))
        return next(((reader.line_num, len(row), columns) for row in rows if len(row) != columns), None)
    except csv.Error:
        return None
    finally:
        text.detach()


def _lines(file: BinaryIO) -> Iterator[str]:
    """Yield the first LARGEST bytes of a file as text, line by line."""
    left, encoding = LARGEST, "utf-8-sig"
    while left > 0 and (line := file.readline(left)):
        yield from io.StringIO(line.decode(encoding, "replace"), newline="")
        left, encoding = left - len(line), "utf-8"


def csv_head(content: bytes, separator: str = ",") -> tuple[list[str], list[str]]:
    """Return the header and the first row of a CSV table, from the start of its content; empty if it is not CSV."""
    lines = content.decode("utf-8-sig", "replace").splitlines(keepends=True)
    try:
        rows = (row for row in csv.reader(lines, delimiter=separator) if any(cell.strip() for cell in row))
        return next(rows, []), next(rows, [])
    except csv.Error:
        return [], []


def _decoded(content: str | bytes, largest: int = LARGEST) -> str:
    if len(content) > largest:
        raise UnreadableError(f"it is larger than {largest >> 20} MiB")
    try:
        return content if isinstance(content, str) else content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableError("it is not UTF-8") from None


def _no_constant(name: str) -> float:
    raise UnreadableError(f"it contains {name}, which is not a finite number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise UnreadableError(f"the number {shown(digits)} is too large")
    return value


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        most, times = Counter(key for key, _ in pairs).most_common(1)[0]
        raise KeyTwiceError(f"the key '{shown(most)}' appears {times} times")
    return table


def _check_characters(value: Any) -> None:
    """Raise UnreadableError for a lone surrogate, which no file can store as text."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text if any("\ud800" <= char <= "\udfff" for char in text):
                raise UnreadableError("it contains half a character (a lone surrogate)")
            case list() as values:
                waiting.extend(values)
            case dict() as table:
                waiting.extend((*table, *table.values()))


class Fields:
    """A table of a document with type-checked access to its fields.

    A missing or null field has the default value of the method; without a default, it is an error.

    Args:
        value: the parsed table.
        what: the description of the table in error messages.

    Raises:
        UnreadableError: if ``value`` is not a table. Each method raises it if the field is missing or has a different
            type.
    """

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            raise UnreadableError(f"{what} is {_kind(value)}, not a table")
        self.what, self._table = what, value

    def check_keys(self, *known: str) -> None:
        """Raise UnreadableError for a key of the table that is not in ``known``."""
        if unknown := [key for key in self._table if key not in known]:
            raise UnreadableError(f"{self.what} has {listed(unknown, 3)}, which is not known")

    def text(self, key: str, default: str | None = None) -> str:
        return self._checked(key, default, self._given(key, default), str, "text")

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._checked(key, default, self._given(key, default), bool, "true or false")

    def whole(self, key: str, default: int | None = None, least: int = 0, most: int = LARGEST_COUNT) -> int:
        value = self._given(key, default)
        if type(value) is float and value.is_integer():  # writers in other languages may write integers as floats
            value = int(value)
        if type(value) is not int or not least <= value <= most:
            raise self._no(key, f"a whole number from {least} on")
        return value

    def wholes(self, key: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Return the list of integers of at least 0 at ``key``."""
        return self._list(key, default, _is_count, "whole numbers")

    def number(self, key: str, default: float | None = None) -> float:
        """Return the number at ``key``; its magnitude is limited so that its square is finite in float32."""
        value = self._given(key, default)
        if not _is_number(value):
            raise self._no(key, f"a number up to {LARGEST_NUMBER:g}")
        return float(value)

    def numbers(self, key: str, default: tuple[float, ...] | None = None) -> tuple[float, ...]:
        """Return the list of numbers at ``key``; magnitudes are limited as for :meth:`number`."""
        return tuple(map(float, self._list(key, default, _is_number, f"numbers up to {LARGEST_NUMBER:g}")))

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Return the list of strings at ``key``."""
        return self._list(key, default, _is_text, "strings")

    def pairs_of_texts(self, key: str) -> tuple[tuple[str, str], ...]:
        """Return the list of pairs of strings at ``key``."""
        return tuple(map(tuple, self._list(key, None, lambda pair: _is_pair(pair, _is_text), "pairs of texts")))

    def pairs_of_wholes(self, key: str, default: tuple[tuple[int, int], ...] | None = None) -> Any:
        """Return the list of pairs of integers of at least 0 at ``key``."""
        pairs = self._list(key, default, lambda pair: _is_pair(pair, _is_count), "pairs of whole numbers")
        return tuple(map(tuple, pairs))

    def table(self, key: str) -> Fields:
        """Return the nested table at ``key``; an empty table if it is missing."""
        return Fields(self._given(key, {}), f"'{shown(key)}' of {self.what}")

    def keys(self) -> list[str]:
        return list(self._table)

    def value(self, key: str) -> Any:
        """Return the unchecked value at ``key``; None if it is missing."""
        return self._table.get(key)

    def _given(self, key: str, default: object) -> Any:
        value = self._table.get(key)
        if value is None and default is None:
            raise UnreadableError(f"{self.what} lacks '{shown(key)}'")
        return default if value is None else value

    def _checked(self, key: str, default: T | None, value: Any, kind: type[T], words: str) -> T:
        if not isinstance(value, kind):
            raise self._no(key, words)
        return value

    def _list(self, key: str, default: Any, fits: Callable[[Any], bool], words: str) -> tuple[Any, ...]:
        value = self._given(key, default)
        if not isinstance(value, list | tuple) or not all(map(fits, value)):
            raise self._no(key, f"a list of {words}")
        return tuple(value)

    def _no(self, key: str, expected: str) -> UnreadableError:
        value = self._table.get(key)
        return UnreadableError(f"'{shown(key)}' of {self.what} is {_brief(value)}; expected {expected}")


def tables_of(value: Any, what: str) -> Iterator[Fields]:
    """Yield each table of a list; raise UnreadableError if ``value`` is not a list, or contains anything else."""
    if not isinstance(value, list):
        raise UnreadableError(f"{what} is {_kind(value)}, not a list")
    for i, entry in enumerate(value):
        yield Fields(entry, f"the entry at index {i} of {what}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST_NUMBER


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_pair(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(fits, value))


def _brief(value: Any) -> str:
    return shown(json.dumps(value)) if isinstance(value, str | bool | float) else _kind(value)


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() if value.bit_length() > 64:
            return f"a number of {value.bit_length()} bits"
        case int() | float():
            return f"the number {value}"
        case str():
            return "text"
        case list():
            return "a list"
    return "a table"

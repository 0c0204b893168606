"""Text columns of files, data frames, dicts of lists and Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradgraph.arguments import PATH, described
from gradgraph.data.preprocess.frames import GAP_WORDS, is_gap
from gradgraph.data.record.matching import declared_classes
from gradgraph.data.tables import SEPARATORS, is_table_file, read_table
from gradgraph.data.texts.json_rows import LINES, json_lines
from gradgraph.data.texts.sentence_files import SUFFIXES, read_sentences
from gradgraph.errors import DataError, listed, row_at, shown, suggestion

_GAPS = frozenset(GAP_WORDS) - {""}


def is_text_file(path: Path) -> bool:
    """Whether the path is a table, or a file of tagged words."""
    return is_table_file(path) or (path.suffix.lower() in SUFFIXES and path.is_file())


class FrameColumns:
    """Columns with one value per sample.

    Args:
        frame: the path of a table or of a file of tagged words; a data frame of pandas or polars, an Arrow table, a
            dataset of Hugging Face, or a dict of lists.

    Attributes:
        names: column names, in order.
        where: the table's name in messages.
        rows: number of samples.

    Raises:
        DataError: ``frame`` is not a table, cannot be read or is empty, or its columns differ in length.
    """

    def __init__(self, frame: Any) -> None:
        self.is_file = PATH.fits(frame)
        self.where = f"'{shown(frame)}'" if self.is_file else "the table"
        self._frame = _read(Path(frame)) if PATH.fits(frame) else frame
        self._is_text = (
            PATH.fits(frame) and Path(frame).suffix.lower() in SEPARATORS
        )  # in these files every cell is a string, and a missing value an empty one
        if isinstance(self._frame, Mapping):
            keys = list(self._frame)
        else:
            keys = list(getattr(self._frame, "column_names", getattr(self._frame, "columns", ())))
        self._keys = {str(key): key for key in keys}
        self.names, self._held = list(self._keys), dict[str, list[Any]]()
        if not (keys or self.is_file) or not hasattr(self._frame, "__getitem__"):
            raise DataError(
                f"{described(frame)} is not a table of texts; pass a path, a data frame, or a dict of lists"
            )
        self.rows = len(self[self.names[0]]) if keys else 0
        if self.rows == 0:
            raise DataError(f"{self.where} is empty; add at least one text")

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._held:
            if name not in self._keys:
                raise DataError(f"{self.where} has no column '{shown(name)}'{suggestion(name, self.names)}")
            column = self._frame[self._keys[name]]
            how = next((how for how in ("to_pylist", "to_list", "tolist") if hasattr(column, how)), None)
            values = list(column) if how is None else getattr(column, how)()
            values = ["" if value is None else value for value in values] if self._is_text else values
            if self._held and len(values) != len(next(iter(self._held.values()))):
                raise DataError(f"the columns of {self.where} differ in length; each needs one value per text")
            self._held[name] = values
        return self._held[name]

    def place(self, i: int) -> str:
        """Return the place of the row at index ``i`` in messages, such as "row 4 of 'reviews.csv'"."""
        return f"{row_at(i, self.is_file)} of {self.where}"

    def texts(self, name: str) -> list[str]:
        """Return a column of texts; raise DataError if a value is missing or not a text."""
        values = self.whole(name)
        if odd := next((value for value in values if not isinstance(value, str)), None):
            raise DataError(f"the column '{shown(name)}' contains {described(odd)} instead of a text; use text only")
        return values

    def labels(self, name: str) -> list[Any]:
        """Return a column of labels; raise DataError for a missing value or an empty text."""
        values = self.whole(name)
        if gaps := sum(isinstance(value, str) and not value.strip() for value in values):
            raise self._lacks(name, gaps)
        return values

    def classes(self, name: str) -> Sequence[str]:
        """Return the class names that a Hugging Face dataset has for a column; empty for other tables."""
        return declared_classes(self._frame, name) or ()

    def lists(self, name: str) -> list[list[Any]]:
        """Return a column of lists, or of texts split at whitespace."""
        return [value.split() if isinstance(value, str) else list(value) for value in self.whole(name, listed_too=True)]

    def whole(self, name: str, listed_too: bool = False) -> list[Any]:
        """Return a column; raise DataError for missing values, or with ``listed_too`` unless all are texts or lists."""
        values = self[name]
        words = [value for value in values if self._is_text and value in _GAPS]
        gaps = len(words) + sum(map(is_gap, values))
        if gaps:
            raise self._lacks(name, gaps, words)
        odd = next((value for value in values if not isinstance(value, str) and not hasattr(value, "__len__")), None)
        if listed_too and odd is not None:
            raise DataError(
                f"the column '{shown(name)}' contains {described(odd)}, but each of its values must be a list"
            )
        return values

    def _lacks(self, name: str, gaps: int, words: Sequence[str] = ()) -> DataError:
        """Return an error for ``gaps`` missing values; ``words`` are ``.csv`` cells read as missing, such as ``NA``."""
        such = f", such as '{shown(words[0])}'," if words else ""
        more = "; if these are words of the texts, save the table as .jsonl or .parquet" if words else ""
        return DataError(
            f"the column '{shown(name)}' of {self.where} has {gaps} missing value{'s' if gaps > 1 else ''}{such} in "
            f"{self.rows} rows; fill or drop those rows{more}"
        )

    def holds(self, name: str, kind: type | tuple[type, ...]) -> bool:
        """Whether all values of column ``name`` except missing ones have the type ``kind``.

        A column of numeric text does not count as text.
        """
        values = [value for value in self[name] if not is_gap(value)]
        if not values or not all(isinstance(value, kind) for value in values):
            return False
        return kind is not str or any(number_of(value) is None for value in values)

    def the_one(self, kind: type | tuple[type, ...], what: str, but: Sequence[str], argument: str) -> str | None:
        """Return the only column, except ``but``, whose values have the type ``kind``; None if there is none.

        For the message, ``what`` names these values, and ``argument`` the option that selects the column.

        Raises:
            DataError: several columns have the type.
        """
        found = [name for name in self.names if name not in but and self.holds(name, kind)]
        if len(found) > 1:
            raise DataError(
                f"{self.where} has several columns of {what} ({listed(found)})",
                remedy=f"say which: {argument}={found[0]!r}",
                shell=f"say which: --text {argument}={found[0]}",
            )
        return found[0] if found else None


def _read(path: Path) -> Any:
    if path.suffix.lower() in SUFFIXES:
        return read_sentences(path)
    if not is_table_file(path):
        raise DataError(
            f"'{shown(path)}' is not a table of texts; pass a .csv, .tsv, .jsonl or .parquet, or a file of tagged "
            f"words ({', '.join(SUFFIXES)})"
        )
    if path.suffix.lower() in LINES:
        rows = json_lines(path).values()
        return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    return read_table(path, as_text=True)


def number_of(value: Any) -> float | int | None:
    """Convert a cell, a number or text, to a number; return None if it is not numeric."""
    if isinstance(value, bool):
        return int(value)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if number.is_integer() else number

"""Rows of texts and messages as dicts, from JSON files, tables, data frames, datasets and lists."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gradgraph.data.preprocess.frames import is_gap
from gradgraph.data.texts.frame_columns import FrameColumns
from gradgraph.data.texts.json_rows import LINES, Row, checked_rows, json_lines, json_rows
from gradgraph.errors import DataError, listed, readable_bytes, row_at, shown

LARGEST = 1 << 30  # bytes of a file: all rows are kept in memory, where they are several times as large


class Records(NamedTuple):
    """Rows whose values have JSON types.

    Attributes:
        rows: the rows.
        where: the name of the data in messages.
        place: a function from the index of a row to its place in messages, such as "line 5 of 'chats.jsonl'".
    """

    rows: list[Row]
    where: str
    place: Callable[[int], str]


def records_in(source: Any) -> Records:
    """Return the rows of a file, a table of any kind, a Hugging Face dataset, a dict of lists or a list of dicts.

    Raises:
        DataError: the source is none of these, cannot be read, or is too large for memory.
    """
    if isinstance(source, list | tuple):
        rows = checked_rows(list(source), "the data")
        return Records(rows, "the data", lambda i: f"{row_at(i, in_file=False)} of the data")
    if isinstance(source, Mapping) and all(hasattr(value, "column_names") for value in source.values()):
        raise DataError(
            f"the data have the splits {listed(source)}; pass one of them, such as data[{next(iter(source), '')!r}]"
        )
    if isinstance(source, str | os.PathLike):
        path, where = Path(source), f"'{shown(source)}'"
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise DataError(f"the data {where} {what}; pass a .jsonl, .json, .csv, .tsv or .parquet")
        size = path.stat().st_size
        if size > LARGEST:
            raise DataError(
                f"{where} has {readable_bytes(size)}, but all rows are loaded into memory; split it into files of at "
                f"most {readable_bytes(LARGEST)}"
            )
        if path.suffix.lower() in LINES:
            lines = json_lines(path)
            numbers = list(lines)
            return Records(list(lines.values()), where, lambda i: f"line {numbers[i]} of {where}")
        if path.suffix.lower() == ".json":
            return Records(json_rows(path), where, lambda i: f"{row_at(i, in_file=True)} of {where}")
    frame = FrameColumns(source)
    columns = [[_plain(value) for value in frame[name]] for name in frame.names]
    return Records([dict(zip(frame.names, row, strict=True)) for row in zip(*columns, strict=True)], frame.where,
                   frame.place)  # fmt: skip


def _plain(value: Any) -> Any:
    """Convert a value of a table library to JSON types: arrays to lists, missing values to None."""
    if isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        kept = ("content",) if "role" in value else ()  # of a message: templates test whether it is None
        return {str(key): _plain(item) for key, item in value.items() if key in kept or not is_gap(item)}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if is_gap(value) else value

"""Rows of JSON files: one object per line, or a list of objects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradgraph.arguments import described
from gradgraph.errors import DataError, shown
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import UnreadableError, open_regular, regular_bytes

LINES = (".jsonl", ".ndjson")
Row = Mapping[str, Any]


def json_lines(path: Path) -> dict[int, Row]:
    """Return the row of each non-empty line by line number; raise DataError for a line that is not an object."""
    found = dict[int, Row]()
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    found[number] = _row(line, f"line {number} of '{shown(path)}'")
    except UnreadableError as error:
        raise DataError(f"'{shown(path)}' cannot be read ({error}); check the path") from None
    return found


def _row(line: bytes, where: str) -> Row:
    try:
        row = json_of(line)
    except UnreadableError as error:
        raise DataError(f"{where} is not valid JSON ({error}); write one object per line") from None
    if not isinstance(row, dict):
        raise DataError(
            f'{where} is {described(row)}, but should be an object such as {{"text": …}}; write one object per line'
        )
    return row


def json_rows(path: Path) -> list[Row]:
    """Return the rows of a list of objects; raise DataError if the file is anything else."""
    try:
        return checked_rows(json_of(regular_bytes(path)), f"'{shown(path)}'")
    except UnreadableError as error:
        raise DataError(f"'{shown(path)}' cannot be read ({error}); write a list of rows, or a .jsonl") from None


def checked_rows(rows: Any, where: str) -> list[Row]:
    """Return ``rows`` if they are a list of dicts; raise DataError otherwise."""
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise DataError(f'{where} should be a list of rows such as {{"text": …}}')
    return rows

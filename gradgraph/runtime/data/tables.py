"""Tables: data frames of pandas and polars, Arrow tables, and the files that these libraries read."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.errors import DataError, listed, shown
from gradgraph.runtime.data.remedies import for_file
from gradgraph.step.manifest import TensorSpec

log = logging.getLogger("gradgraph")

# suffix: the readers of pandas and of polars
_READERS: dict[str, tuple[str, str]] = {
    ".csv": ("read_csv", "read_csv"),
    ".tsv": ("read_table", "read_csv"),
    ".parquet": ("read_parquet", "read_parquet"),
    ".feather": ("read_feather", "read_ipc"),
    ".arrow": ("read_feather", "read_ipc"),
    ".jsonl": ("read_json", "read_ndjson"),
}


def is_table(data: Any) -> bool:
    """Is it a DataFrame of pandas or polars, or an Arrow table?"""
    if hasattr(data, "column_names") and hasattr(data, "to_pydict"):
        return True
    return hasattr(data, "columns") and hasattr(data, "to_numpy") and hasattr(data, "__getitem__")


def is_table_file(path: Path) -> bool:
    return path.suffix.lower() in _READERS and len(path.name) < 255 and path.is_file()


def read_table(path: Path) -> Any:
    """The table in a file, read by pandas, or by polars where that is not installed; raises DataError."""
    suffix = path.suffix.lower()
    for library, name in zip(("pandas", "polars"), _READERS[suffix], strict=True):
        try:
            read: Callable[..., Any] = getattr(importlib.import_module(library), name)
        except ImportError:
            continue
        options: dict[str, Any] = {".tsv": {"separator": "\t"}}.get(suffix, {}) if library == "polars" else {}
        options |= {"lines": True} if (library, suffix) == ("pandas", ".jsonl") else {}
        try:
            return read(str(path), **options)
        except ImportError:  # pandas needs pyarrow for Parquet
            continue
        except Exception as error:  # of any class of these libraries
            first = str(error).split("\n", 1)[0]
            raise DataError(f"'{shown(path)}' cannot be read ({shown(first)}); save the table again") from None
    ways = for_file(path)
    raise DataError(
        f"'{shown(path)}' is a table, which pandas or polars reads, and neither is there",
        remedy=f"pip install 'onnx-gradgraph[tables]', or {ways['remedy']}",
        shell=f"pip install 'onnx-gradgraph[tables]', or {ways['shell']}",
    )


def columns_of(
    table: Any, specs: Mapping[str, TensorSpec], unread: Collection[str] = ()
) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays that a step takes, from a table: columns of its names; all others, in order, are its one matrix.

    Columns of names that are ``unread`` are left out.

    Raises:
        DataError: columns are missing, or too many; hold no numbers, or gaps.
    """
    names = columns_in(table)
    narrow = [name for name, spec in specs.items() if len(spec.shape) == 1]
    wide = [spec for name, spec in specs.items() if name not in narrow]
    rest = [name for name in names if name not in specs and name not in unread]
    # a matrix takes a column for each of the rest
    takes_rest = rest and all(len(spec.shape) == 2 and spec.shape[1] in (len(rest), None) for spec in wide)
    if any(name not in names for name in narrow) or len(wide) > 1 or (wide and not takes_rest):
        parts = ", ".join(f"'{shown(n)}': frame[[…]].to_numpy()" for n in specs)
        takes = ", ".join(str(spec) for spec in specs.values())
        raise DataError(
            f"the table has the columns {listed(names)}, and the step takes {takes}: columns of these names, and as "
            "many others as its one matrix has columns",
            remedy=f"rename or choose columns, or give each as an array: {{{parts}}}",
            shell="rename its columns, or leave out those that the model does not take",
        )
    found = {name: _numbers(table, name) for name in narrow}
    for spec in wide:
        found[spec.name] = np.column_stack([_numbers(table, name) for name in rest])
        log.info("'%s' is made of the columns %s", shown(spec.name), listed(rest))
    return {name: found[name] for name in specs}


def columns_in(table: Any) -> list[str]:
    """The names of a table's columns."""
    return [str(name) for name in (table.column_names if hasattr(table, "column_names") else table.columns)]


def _numbers(table: Any, name: str) -> np.ndarray[Any, Any]:
    column = table[name]
    array = np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"the column '{shown(name)}' holds {array.dtype}, not numbers; encode it as numbers, or leave it out"
        )
    if array.dtype.kind == "f" and (gaps := int(np.isnan(array).sum())):
        raise DataError(
            f"the column '{shown(name)}' has {gaps} missing value{'s' if gaps > 1 else ''}; fill or drop those rows"
        )
    return array

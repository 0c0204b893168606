"""Tables: data frames of pandas and polars, Arrow tables, and the files that these libraries read."""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.errors import DataError, UnmatchedError, listed, shown
from gradgraph.files.untrusted.documents import LARGEST, csv_columns
from gradgraph.files.untrusted.regular import UnreadableError, open_regular
from gradgraph.runtime.data.matching import class_numbers, classes_for
from gradgraph.runtime.data.remedies import for_file, takes_labels
from gradgraph.step.data_names import NO_NAMES, DataNames
from gradgraph.step.manifest import TensorSpec

log = logging.getLogger("gradgraph")

Array = np.ndarray[Any, Any]

# suffix: the readers of pandas and of polars
_READERS: dict[str, tuple[str, str]] = {
    ".csv": ("read_csv", "read_csv"),
    ".tsv": ("read_table", "read_csv"),
    ".parquet": ("read_parquet", "read_parquet"),
    ".feather": ("read_feather", "read_ipc"),
    ".arrow": ("read_feather", "read_ipc"),
    ".jsonl": ("read_json", "read_ndjson"),
}
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_MANY_COLUMNS = 10_000


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
    if suffix in _SEPARATORS:
        _check_header(path, _SEPARATORS[suffix])
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


def _check_header(path: Path, separator: str) -> None:
    """Raise DataError where names come twice among so many that pandas would take ages to tell them apart."""
    try:
        with open_regular(path) as file:
            names = csv_columns(file.read(LARGEST), separator)
    except (UnreadableError, OSError):
        return  # which the library says, too
    if len(names) > _MANY_COLUMNS and len(set(names)) < len(names):
        twice, times = Counter(names).most_common(1)[0]
        raise DataError(
            f"'{shown(path)}' has {len(names):,} columns, {times} of them called '{shown(twice)}'; give each a name of "
            "its own"
        )


def columns_of(
    table: Any, specs: Mapping[str, TensorSpec], known: DataNames = NO_NAMES, unread: Collection[str] = ()
) -> tuple[dict[str, Array], DataNames]:
    """The arrays that a step takes, from a table, with the names of what they are made of.

    Columns of the names of the step are read as these. A matrix is made of the columns of which it was made before, by
    ``known``, in whatever order they come; a matrix that is not known is made of all others, in their order. Columns of
    names that are ``unread`` are left out.

    Raises:
        UnmatchedError: columns that are known are missing, or labels are new.
        DataError: columns are missing, or too many; hold no numbers, or gaps.
    """
    columns = _Columns(table)
    narrow = [name for name, spec in specs.items() if len(spec.shape) == 1]
    wide = [spec for name, spec in specs.items() if name not in narrow]
    made_of = {spec.name: list(known.columns[spec.name]) for spec in wide if spec.name in known.columns}
    used = {*specs, *unread, *(column for each in made_of.values() for column in each)}
    rest = [name for name in columns.keys if name not in used]
    new = [spec for spec in wide if spec.name not in made_of]
    # a matrix takes a column for each of the rest
    takes_rest = rest and all(len(spec.shape) == 2 and spec.shape[1] in (len(rest), None) for spec in new)
    if any(name not in columns.keys for name in narrow) or len(new) > 1 or (new and not takes_rest):
        parts = ", ".join(f"'{shown(n)}': frame[[…]].to_numpy()" for n in specs)
        takes = ", ".join(str(spec) for spec in specs.values())
        raise DataError(
            f"the table has the columns {listed(columns.keys)}, and the step takes {takes}: columns of these names, "
            "and as many others as its one matrix has columns",
            remedy=f"rename or choose columns, or give each as an array: {{{parts}}}",
            shell="rename its columns, or leave out those that the model does not take",
        )
    if new:
        made_of[new[0].name] = rest
        log.info("'%s' is made of the columns %s", shown(new[0].name), listed(rest))
    found, classes = dict[str, Array](), dict[str, Sequence[str]]()
    for name, each in made_of.items():
        found[name] = columns.matrix(name, each, [] if new else rest)
    for name in narrow:
        found[name], labels = columns.labels_or_numbers(specs[name], known.classes.get(name))
        classes |= {} if labels is None else {name: labels}
    return {name: found[name] for name in specs}, DataNames(made_of, classes)


def matrix_of(table: Any, name: str, known: DataNames) -> tuple[Array, DataNames]:
    """The matrix ``name`` of a table that is given for it alone: all its columns, or those that are ``known``.

    Raises:
        UnmatchedError: columns that are known are missing.
        DataError: a column holds no numbers.
    """
    columns = _Columns(table)
    made_of = list(known.columns.get(name, columns.keys))
    rest = [column for column in columns.keys if column not in set(made_of)]
    return columns.matrix(name, made_of, rest, may_have_gaps=True), DataNames({name: made_of})


def columns_in(table: Any) -> list[str]:
    """The names of a table's columns."""
    return list(_Columns(table).keys)


class _Columns:
    """The columns of a table.

    Attributes:
        keys: what the table itself calls each column, which need not be text, by its name.

    Raises:
        DataError: two have one name.
    """

    def __init__(self, table: Any) -> None:
        every = list(table.column_names if hasattr(table, "column_names") else table.columns)
        self._table, self.keys = table, {str(key): key for key in every}
        if len(self.keys) < len(every):
            names = [str(key) for key in every]
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"the table has two columns '{shown(twice)}'; give each a name of its own")

    def matrix(self, name: str, made_of: Sequence[str], rest: Sequence[str], may_have_gaps: bool = False) -> Array:
        """These columns side by side; the ``rest`` is left out, and who has some is told."""
        missing = [column for column in made_of if column not in self.keys]
        if missing:
            has = f", and has the new {_columns(rest)}" if rest else ""
            raise UnmatchedError(
                f"the table lacks the {_columns(missing)}, of which '{shown(name)}' is made{has}",
                remedy="give columns the names that they had in training, or arrays where their order is meant",
                shell="give columns the names that they had in training",
            )
        if rest:
            log.warning("the %s of the table %s not read: '%s' is made of %s", _columns(rest),
                        "is" if len(rest) == 1 else "are", shown(name), listed(made_of))  # fmt: skip
        return np.column_stack([self._numbers(column, may_have_gaps) for column in made_of])

    def labels_or_numbers(self, spec: TensorSpec, known: Sequence[str] | None) -> tuple[Array, Sequence[str] | None]:
        """A column; of labels that are text the numbers of their classes, and the names of all of these."""
        values = self._values(spec.name) if takes_labels(spec) else np.zeros(0)
        if not _is_text(values):
            return self._numbers(spec.name), None
        labels = [str(value) for value in values]
        found, where = sorted(set(labels)), f"the column '{shown(spec.name)}'"
        names = classes_for(spec, found, known, where)
        numbers = dict(zip(found, class_numbers(found, names, where), strict=True))
        return np.array([numbers[label] for label in labels], np.int64), names

    def _values(self, name: str) -> Array:
        column = self._table[self.keys[name]]
        return np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)

    def _numbers(self, name: str, may_have_gaps: bool = False) -> Array:
        array = self._values(name)
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"the column '{shown(name)}' holds {array.dtype}, not numbers; encode it as numbers, or leave it out"
            )
        if not may_have_gaps and array.dtype.kind == "f" and (gaps := int(np.isnan(array).sum())):
            raise DataError(
                f"the column '{shown(name)}' has {gaps} missing value{'s' if gaps > 1 else ''}; fill or drop those rows"
            )
        return array


def _is_text(values: Array) -> bool:
    is_text = values.dtype.kind == "O" and all(isinstance(value, str) for value in values.tolist())
    return bool(values.size) and (values.dtype.kind in "UT" or is_text)


def _columns(names: Sequence[str]) -> str:
    return f"column{'' if len(names) == 1 else 's'} {listed(names)}"

"""Tables as training data: data frames of pandas and polars, Arrow tables, and table files such as CSV and Parquet."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.data.preprocess.computed import Preprocessing
from gradgraph.data.preprocess.drift import Drift
from gradgraph.data.preprocess.frames import EXACT, Frame, is_gap, text_of, with_numbers
from gradgraph.data.record.classes import Classes, ClassNumbers, kind_of, labelled, takes_labels
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import TargetSpec, TensorSpec, check_some, numpy_dtype
from gradgraph.errors import DataError, Remedies, UnmatchedError, counted, listed, shown, suggestion
from gradgraph.files.untrusted.documents import LARGEST, KeyTwiceError, csv_columns, csv_head, json_of, odd_csv_row
from gradgraph.files.untrusted.regular import UnreadableError, open_regular

log = logging.getLogger("gradgraph")

Array = np.ndarray[Any, Any]

# suffix → the names of the reading functions of pandas and of polars
_READERS: dict[str, tuple[str, str]] = {
    ".csv": ("read_csv", "read_csv"),
    ".tsv": ("read_table", "read_csv"),
    ".parquet": ("read_parquet", "read_parquet"),
    ".feather": ("read_feather", "read_ipc"),
    ".arrow": ("read_feather", "read_ipc"),
    ".jsonl": ("read_json", "read_ndjson"),
}
TAB = "\t"
SEPARATORS = {".csv": ",", ".tsv": TAB}
_AS_TEXT: dict[str, dict[str, Any]] = {
    "pandas": {"dtype": str, "keep_default_na": False},
    "polars": {"infer_schema": False},  # empty cells are read as null
}
_IN_FULL: dict[str, dict[str, dict[str, Any]]] = {  # options with which the type of a cell does not depend on others
    "pandas": {
        ".csv": {"low_memory": False},
        ".tsv": {"low_memory": False},
        ".jsonl": {"lines": True, "dtype": False, "convert_axes": False, "precise_float": True},
    },
    "polars": {".tsv": {"separator": "\t"}},
}
_GUESSES: dict[str, dict[str, Any]] = {  # options against guesses of pandas before 3.1: rounded floats, dates by name
    ".csv": {"float_precision": "round_trip"},
    ".tsv": {"float_precision": "round_trip"},
    ".jsonl": {"convert_dates": False},
}
_CODE = re.compile(r"0[0-9]+|[0-9]{16,}")
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,40}\s*", re.ASCII)
_LOOKED_AT = 1000  # maximum number of columns inspected for text
_HEAD = 1 << 16  # bytes read from the beginning of a file to check its first row


def is_table_file(path: Path) -> bool:
    return path.suffix.lower() in _READERS and len(path.name) < 255 and path.is_file()


def read_table(
    path: Path, as_text: bool = False, known: DataNames = NO_NAMES, specs: Mapping[str, TensorSpec] | None = None
) -> Any:
    """Read a table file with pandas, or with polars if pandas is not installed.

    Args:
        as_text: read every cell of a ``.csv`` or ``.tsv`` as text, including "NA".
        known: column and class names of the training data: columns that were text there are read as text, even if they
            only contain numbers here, such as "01".
        specs: the inputs and targets of a step; columns of labels are read as text, too.

    Raises:
        DataError: if the file cannot be read, or neither library is installed.
    """
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        _check_first_row(path)
    if suffix not in SEPARATORS:
        return _read_by_library(path, {})
    _check_header(path, SEPARATORS[suffix])
    if as_text:
        return _read_by_library(path, _AS_TEXT)
    texts = _texts_in(known, specs or {})
    return _read_by_library(path, _texts_alone(texts) if texts else {})


def codes_in(path: Path, names: Collection[str], rows: int | None = None) -> dict[str, Array]:
    """Return the columns among ``names`` of a ``.csv`` or ``.tsv`` that contain codes: their cells as text, by name.

    Codes are integers with a leading 0, or with too many digits for exact floats. Missing values are None. Only the
    first ``rows`` rows are checked, by default all.
    """
    if path.suffix.lower() not in SEPARATORS or not names:
        return {}
    columns = Frame(_read_by_library(path, _texts_alone(names, alone=True, rows=rows)))
    found = {name: np.array([None if is_gap(v) else v for v in columns[name].tolist()], object) for name in names}
    return {name: texts for name, texts in found.items() if any(_CODE.fullmatch(text or "") for text in texts)}


def written_in(table: Any) -> Any:
    """Return the table at the path ``table`` with every cell as text; None unless it is a ``.csv`` or ``.tsv``."""
    is_path = isinstance(table, str | os.PathLike)
    return read_table(Path(table), as_text=True) if is_path and Path(table).suffix.lower() in SEPARATORS else None


def _read_by_library(path: Path, more: Mapping[str, Mapping[str, Any]]) -> Any:
    """Read a table file with pandas, or else with polars; ``more`` contains additional options by library name."""
    suffix = path.suffix.lower()
    for library, name in zip(("pandas", "polars"), _READERS[suffix], strict=True):
        try:
            read: Callable[..., Any] = getattr(importlib.import_module(library), name)
        except ImportError:
            continue
        try:
            options = {**_IN_FULL[library].get(suffix, {}), **more.get(library, {})}
            table = read(str(path), **_without_guesses(importlib.import_module(library), suffix), **options)
            if suffix in SEPARATORS:
                _check_widths(path, SEPARATORS[suffix], table)
                return table if library == "polars" else _with_exact_ids(table, read, str(path))
            return table
        except ImportError:  # pandas needs pyarrow for Parquet
            continue
        except DataError:
            raise
        except Exception as error:  # these libraries raise exceptions of many classes
            first = str(error).split("\n", 1)[0]
            how = " as UTF-8" if isinstance(error, UnicodeError) else ""
            raise DataError(f"'{shown(path)}' cannot be read ({shown(first)}); save the table again{how}") from None
    needed = "pandas" if suffix in SEPARATORS or suffix == ".jsonl" else "pandas with pyarrow"
    install = 'install the extra: pip install ".[tables]", or pip install pandas pyarrow'
    raise DataError(
        f"reading the table '{shown(path)}' requires {needed} or polars, and neither is installed",
        remedy=install,
        shell=install,
    )


def _with_exact_ids(table: Any, read: Callable[..., Any], path: str) -> Any:
    """Replace float columns of a pandas table that have missing values and values above 2**53 with exact integers.

    Pandas stores integer columns with missing values as floats, which rounds such values.
    """
    floats = [name for name, kind in table.dtypes.items() if kind == np.float64]
    large = [name for name in floats if (np.abs(table[name].to_numpy()) >= EXACT).any()]
    texts = read(path, usecols=large, dtype=str) if large else table
    for name in large:
        cells = [None if is_gap(cell) else cell for cell in texts[name].tolist()]
        if all(cell is None or _INTEGER.fullmatch(cell) for cell in cells):
            whole = [None if cell is None else int(cell) for cell in cells]
            table[name] = np.fromiter(whole, object, len(whole))
    return table


def _without_guesses(library: Any, suffix: str) -> Mapping[str, Any]:
    """Return the options that stop an old pandas from converting cells; empty for other versions and libraries."""
    version = tuple(int(part) for part in library.__version__.split(".")[:2])
    return _GUESSES.get(suffix, {}) if library.__name__ == "pandas" and version < (3, 1) else {}


def _texts_in(known: DataNames, specs: Mapping[str, TensorSpec]) -> set[str]:
    """Return the names of columns to read as text: labels, and columns that were text in the training data."""
    plan = known.preprocess
    targets = [*known.classes, *(name for name, spec in specs.items() if takes_labels(spec) and _takes_one(spec))]
    texts = {column for target in targets for column in list(known.columns.get(target, [target]))[:1]}
    if plan is not None:
        texts |= {name for name, learnt in plan.targets.items() if learnt.classes}
        texts |= {name for name, kind in plan.read.items() if kind.takes_text}
    return texts


def _texts_alone(names: Collection[str], alone: bool = False, rows: int | None = None) -> dict[str, dict[str, Any]]:
    """Return options by library to read ``names`` as text; with ``alone``, only these columns and ``rows`` rows."""
    as_text, chosen = dict.fromkeys(names, str), list(names)
    return {
        "pandas": {"dtype": as_text, **({"usecols": chosen, "nrows": rows} if alone else {})},
        "polars": {"schema_overrides": as_text, **({"columns": chosen, "n_rows": rows} if alone else {})},
    }


def _check_first_row(path: Path) -> None:
    """Raise DataError if the first row of a ``.jsonl`` has a duplicate key; libraries keep only the last value."""
    try:
        with open_regular(path) as file:
            json_of(file.readline(LARGEST))
    except KeyTwiceError as error:
        raise DataError(f"the first row of '{shown(path)}' cannot be read ({error}); rename duplicate keys") from None
    except (UnreadableError, OSError):
        return  # the library raises an error, too


def _check_header(path: Path, separator: str) -> None:
    """Raise DataError if two columns have the same name (pandas would rename one), or ``separator`` does not occur."""
    try:
        with open_regular(path) as file:
            names = csv_columns(file, separator)
    except (UnreadableError, OSError):
        return  # the library raises an error, too
    twice, times = Counter(filter(None, names)).most_common(1)[0] if any(names) else ("", 0)
    if times > 1:
        raise DataError(
            f"{times} of the {len(names):,} columns of '{shown(path)}' have the name '{shown(twice)}'; give each a "
            "unique name"
        )
    if names and names[0] == "sep=":
        raise DataError(f"the first line of '{shown(path)}' only names the separator, for spreadsheets; delete it")
    others = [sign for sign in (";", TAB, ",") if sign != separator and len(names) == 1 and sign in names[0]]
    if others:
        parted, wanted = ({";": "semicolons", TAB: "tabs", ",": "commas"}[sign] for sign in (others[0], separator))
        raise DataError(
            f"the cells of '{shown(path)}' are separated by {parted}, but {wanted} are expected",
            remedy=f"save it with {wanted}, or pass pandas.read_csv(path, sep={others[0]!r}, decimal=',')",
            shell=f"save it with {wanted}",
        )


def _check_widths(path: Path, separator: str, table: Any) -> None:
    """Raise DataError if a row has more or fewer cells than the header; pandas would shift or fill its cells.

    Rows are only scanned if the first row has too many cells, or the last column has missing values.
    """
    with contextlib.suppress(UnreadableError, OSError), open_regular(path) as file:
        header, first = csv_head(file.read(_HEAD), separator)
        if len(first) <= len(header) and not (len(table.columns) and _has_gaps(table)):
            return
        file.seek(0)
        odd = odd_csv_row(file, separator)
        if odd is not None:
            line, cells, columns = odd
            raise DataError(
                f"line {line} of '{shown(path)}' has {counted(cells, 'cell')}, but the header has {columns}; put cells "
                f"that contain a {'tab' if separator == TAB else 'comma'} in quotes, or correct the line"
            )


def _has_gaps(table: Any) -> bool:
    """Whether the last column of the table has a missing value."""
    last = table[table.columns[-1]]
    gaps = last.is_null() if hasattr(last, "is_null") else last.isna()
    return bool((gaps | (last == "") if str(last.dtype).lower().startswith("str") else gaps).any())


def first_row(path: Path) -> list[Any]:
    """Return the cells of the first row of a table file; empty if it cannot be read."""
    separator = SEPARATORS.get(path.suffix.lower())
    if separator is None and path.suffix.lower() != ".jsonl":
        columns = _Columns(read_table(path))
        return [cell for name in columns for cell in columns[name][:1].tolist()]
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD)
        if separator is not None:
            return csv_head(head, separator)[1]
        row = json_of(head.partition(b"\n")[0])
        return list(row.values()) if isinstance(row, dict) else []
    except (UnreadableError, OSError):
        return []  # reading the whole file raises the error


def columns_of(
    table: Any,
    specs: Mapping[str, TensorSpec],
    known: DataNames = NO_NAMES,
    unread: Collection[str] = (),
    whole: bool = True,
) -> tuple[dict[str, Array], DataNames]:
    """Return the inputs and targets of a step from a table, and the names of the columns that they were made from.

    An input with one number per sample is read from the column with its name. An input with column names in ``known``
    is read from these columns, regardless of their order in the table. Another matrix input is made from all other
    columns except ``unread``, in order.

    Args:
        known: column and class names of the training data.
        whole: whether the table is the whole data, not a batch.

    Raises:
        UnmatchedError: if columns of the training data are missing, or a class is new.
        DataError: if there are too few or too many columns, or they contain text or missing values.
    """
    columns = _Columns(table)
    if whole and columns.keys:
        check_some(len(columns[next(iter(columns))]))
    made = _preprocessed(table, specs, known)
    every, specs = specs, {name: spec for name, spec in specs.items() if name not in made}
    made_of, new = _made_of(columns, specs, known, unread)
    if new is not None:
        log.info("'%s' is made from the columns %s", shown(new), listed(made_of[new]))
    rest = _rest(columns, specs, made_of, known, unread)
    found, classes = dict[str, Array](made), NO_NAMES
    for name, each in made_of.items():
        if _takes_one(specs[name]) and len(each) == 1 and each[0] in columns.keys:
            found[name], labels = columns.labels_or_numbers(specs[name], each[0], known, whole)
            classes = classes if labels is None else classes.updated(labels.of(name))
            continue
        found[name] = columns.matrix(name, each, rest)
        rest = []  # logged once
    own = {name: each for name, each in made_of.items() if each != [name]}
    return {name: found[name] for name in every}, DataNames(own, preprocess=known.preprocess).updated(classes)


def _preprocessed(table: Any, specs: Mapping[str, TensorSpec], known: DataNames) -> dict[str, Array]:
    """Return the features that the preprocessing in ``known``, if any, computes from a table.

    If the model itself contains the preprocessing, return the columns that it reads instead.
    """
    plan = known.preprocess
    if plan is None:
        return {}
    if plan.stands_before({n: len(spec.shape) for n, spec in specs.items() if not isinstance(spec, TargetSpec)}):
        return _fed(plan, table)
    features = plan.features
    for name, own in features.items():
        width = specs[name].shape[1] if name in specs and len(specs[name].shape) == 2 else 0
        if width not in (len(own), None):
            takes = f"expects {width}" if width else "is not a matrix input of the model"
            marked = any(kind.marks_gaps for kind in plan.columns.values())
            fewer = ' (with "indicator": false, missing values add no features)' if marked else ""
            raise DataError(
                f"the preprocessing computes {counted(len(own), 'feature')} per row ({listed(own)}), but the input "
                f"'{shown(name)}' {takes}; choose other columns or column kinds{fewer}, or a model with this number of "
                "inputs"
            )
    return plan.computed(_fed(plan, table))


def _fed(plan: Preprocessing, table: Any) -> dict[str, Array]:
    """Return the columns of ``table`` that ``plan`` reads, by name, and log values not seen in training."""
    feeds = plan.feeds(table)
    if said := str(Drift.of(plan.read, feeds)):
        log.warning("%s", said)
    return feeds


def target_columns(targets: Sequence[TensorSpec], given: Sequence[str]) -> DataNames:
    """Assign the ``given`` columns to the targets: all to a single target, otherwise one to each in order.

    Raises:
        DataError: if there are several targets, and their number differs from the number of columns.
    """
    if len(targets) == 1:
        return DataNames({targets[0].name: given})
    if len(targets) != len(given):
        raise DataError(
            f"the step has {len(targets)} targets ({listed([t.name for t in targets])}), but the {_columns(given)} "
            f"{'is' if len(given) == 1 else 'are'} given for them; name one column per target"
        )
    return DataNames({t.name: [column] for t, column in zip(targets, given, strict=True)})


def _made_of(
    columns: _Columns, specs: Mapping[str, TensorSpec], known: DataNames, unread: Collection[str]
) -> tuple[dict[str, list[str]], str | None]:
    """Return the columns of each input or target, and the input that consists of all other columns (else None)."""
    made_of: dict[str, list[str]] = {}
    for name, spec in specs.items():
        if name in known.columns:
            made_of[name] = list(known.columns[name])
        elif name in columns.keys and _takes_one(spec):
            made_of[name] = [name]
    for name in made_of:
        _check_target(columns, specs[name], made_of[name])
    rest = _rest(columns, specs, made_of, known, unread)
    match [spec for name, spec in specs.items() if name not in made_of]:
        case []:
            return made_of, None
        case [spec] if rest and len(spec.shape) == 2 and spec.shape[1] in (len(rest), None):
            made_of[spec.name] = rest
            return {name: made_of[name] for name in specs}, spec.name
        case missing:
            raise _unfitting(columns, specs, missing, rest)


def _rest(
    columns: _Columns,
    specs: Collection[str],
    made_of: Mapping[str, Sequence[str]],
    known: DataNames,
    unread: Collection[str],
) -> list[str]:
    """Return the columns, except ``unread``, that no input, target or preprocessing uses."""
    plan = known.preprocess
    used = {*specs, *unread, *(column for each in made_of.values() for column in each)}
    used |= {*plan.columns, *plan.targets} if plan is not None else set()
    return [name for name in columns if name not in used]


def _takes_one(spec: TensorSpec) -> bool:
    """Whether an input or target has one number per sample."""
    return len(spec.shape) == 1 or (len(spec.shape) == 2 and spec.shape[1] == 1)


def _check_target(columns: _Columns, spec: TensorSpec, made_of: Sequence[str]) -> None:
    """Raise DataError if the columns of a target are missing from the table, or are too many or too few."""
    if not isinstance(spec, TargetSpec):
        return
    if missing := [column for column in made_of if column not in columns.keys]:
        raise DataError(
            f"the table lacks the {_columns(missing)} of the target "
            f"'{shown(spec.name)}'{suggestion(missing[0], list(columns.keys))}"
        )
    width = 1 if _takes_one(spec) else spec.shape[1] if len(spec.shape) == 2 else len(made_of)
    if width not in (len(made_of), None):
        raise DataError(
            f"the target '{shown(spec.name)}' requires {width} column{'' if width == 1 else 's'}, but the "
            f"{_columns(made_of)} {'is' if len(made_of) == 1 else 'are'} given for it; name {width}"
        )


def _unfitting(
    columns: _Columns, specs: Mapping[str, TensorSpec], missing: Sequence[TensorSpec], rest: Sequence[str]
) -> DataError:
    """Return the error for a table without matching columns for the inputs and targets ``missing``."""
    takes = ", ".join(str(spec) for spec in specs.values())
    has = f"the table has the columns {listed(columns.keys)}, but the step expects {takes}"
    targets = [spec.name for spec in missing if isinstance(spec, TargetSpec)]
    takes_tokens = any(spec.dtype.startswith("int") and len(spec.shape) > 1 for spec in missing)
    texts = [name for name in rest[:_LOOKED_AT] if columns.is_text(name)]
    if takes_tokens and texts:
        return DataError(
            f"{has}: texts require a tokenizer",
            remedy=f"use gradgraph.text.table(frame, 'tokenizer.json', text={texts[0]!r})",
            shell=f"add --tokenizer tokenizer.json --text text={texts[0]}",
        )
    if targets:
        name = shown(targets[0])
        return DataError(
            f"{has}: there is no column '{name}'",
            remedy=(
                f"rename or choose columns, or map it: trainer.names = gradgraph.DataNames(columns={{'{name}': ['…']}})"
            ),
            shell="rename a column, or name it with --target COLUMN",
        )
    wide = [spec for spec in missing if len(spec.shape) == 2]
    if len(missing) == 1 and wide:
        width = wide[0].shape[1]
        holds = f" ({listed(texts)} contain{'s' if len(texts) == 1 else ''} text)" if texts else ""
        remain = "remains" if len(rest) == 1 else "remain"
        why = f"'{shown(wide[0].name)}' requires {width} columns, but {len(rest)} {remain} for it{holds}"
    else:
        why = (
            f"{listed([spec.name for spec in missing])} should each be a column of this name, or one matrix of all "
            "other columns"
        )
    parts = ", ".join(f"'{shown(n)}': frame[[…]].to_numpy()" for n in specs)
    return DataError(
        f"{has}: {why}",
        remedy=f"rename or choose columns, or pass each as an array: {{{parts}}}",
        shell="rename its columns, or drop those that are not inputs of the model, in the file or by --preprocess auto "
        "with --column NAME=drop",
    )


def matrix_of(table: Any, name: str, known: DataNames) -> tuple[Array, DataNames]:
    """Return the matrix for the input ``name`` from a table that was passed for it, and the names of its columns.

    It consists of the columns used in training, or of all columns if ``known`` has none for this input.

    Raises:
        UnmatchedError: if columns of the training data are missing.
        DataError: if a column is not numeric.
    """
    columns = _Columns(table)
    made_of = list(known.columns.get(name, columns.keys))
    rest = [column for column in columns.keys if column not in set(made_of)]
    return columns.matrix(name, made_of, rest, may_have_gaps=True), DataNames({name: made_of})


class _Columns(Frame):
    """A table whose columns can be converted to the inputs and targets of a step."""

    def matrix(self, name: str, made_of: Sequence[str], rest: Sequence[str], may_have_gaps: bool = False) -> Array:
        """Return the matrix for the input ``name`` from the columns ``made_of``; warn that ``rest`` is ignored."""
        missing = [column for column in made_of if column not in self.keys]
        if missing:
            has = f", and has the new {_columns(rest)}" if rest else ""
            raise UnmatchedError(
                f"the table lacks the {_columns(missing)} of '{shown(name)}'{has}",
                remedy="rename columns as in training, or pass arrays to match columns by position",
                shell="rename columns as in training",
            )
        if rest:
            log.warning("the %s of the table %s ignored: '%s' is made from %s", _columns(rest),
                        "is" if len(rest) == 1 else "are", shown(name), listed(made_of))  # fmt: skip
        return np.column_stack([self._numbers(column, may_have_gaps) for column in made_of])

    def labels_or_numbers(
        self, spec: TensorSpec, column: str, known: DataNames, whole: bool = True
    ) -> tuple[Array, Classes | None]:
        """Return a column in the shape of ``spec``: class indices with their classes, or numbers with None."""
        shape = (-1,) if len(spec.shape) == 1 else (-1, 1)
        if numpy_dtype(spec.dtype).kind in "OUT":
            return text_of(self[column]).reshape(shape), None
        learnt = None if known.preprocess is None else known.preprocess.targets.get(column)
        classes = Classes.known(known, spec.name)
        if learnt is not None and learnt.classes and takes_labels(spec):
            classes = Classes(learnt.classes)
        if not isinstance(spec, TargetSpec) or not _are_labels(self[column], spec, classes):
            numbers = self._numbers(column, is_target=isinstance(spec, TargetSpec)).reshape(shape)
            return (numbers if learnt is None else numbers.astype(numpy_dtype(spec.dtype))), None
        numbers, classes = labelled(self[column], spec, classes, f"the column '{shown(column)}'", whole=whole)
        return numbers.reshape(shape), classes

    def is_text(self, name: str) -> bool:
        return self[name].dtype.kind in "OUT"

    def _numbers(self, name: str, may_have_gaps: bool = False, is_target: bool = False) -> Array:
        array = with_numbers(name, self[name])
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"the column '{shown(name)}' contains {array.dtype}, not numbers",
                **_remedies("encode it as numbers, or drop it", is_target),
            )
        if not may_have_gaps and array.dtype.kind == "f" and (gaps := int(np.isnan(array).sum())):
            raise DataError(
                f"the column '{shown(name)}' has {gaps} missing value{'s' if gaps > 1 else ''}",
                **_remedies("fill or drop those rows", is_target),
            )
        return array


def _remedies(own: str, is_target: bool) -> Remedies:
    """Return the remedies for a column with values that are not numbers: ``own`` and, for an input, preprocessing."""
    plan = "gradgraph.preprocess.fit(frame, target='…')"
    python, shell = f"trainer.names = gradgraph.DataNames(preprocess={plan})", "add --preprocess auto"
    return {"remedy": own if is_target else f"{own}; or {python}", "shell": own if is_target else f"{own}; or {shell}"}


def array_labels(
    value: Any, spec: TensorSpec, known: DataNames, raw: bool = True, whole: bool = True
) -> tuple[Array, DataNames] | None:
    """Return the class indices of labels, and the names of their classes; None if the values need no conversion.

    Args:
        value: the labels: an array, a list, or a column of a table, [rows] or [rows, 1].
        raw: whether the values come directly from the user, so that integers may be class names.
        whole: whether these are all labels of the data, not only of a batch.

    Raises:
        UnmatchedError: if the classes are known from training, and one is new.
        DataError: if the model has fewer classes.
    """
    if not isinstance(spec, TargetSpec) or isinstance(value, ClassNumbers) or not _takes_one(spec):
        return None
    classes = Classes.known(known, spec.name)
    looks = raw and (whole if classes is None else classes.look_at_numbers(spec))
    if isinstance(value, list | tuple):
        kind = {str: "U", bool: "b", int: "i", float: "f"}.get(type(value[0]), "") if value else ""
    else:
        kind = getattr(getattr(value, "dtype", None), "kind", "i" if hasattr(value, "__dlpack__") else "")
    if kind not in ("iufbOUT" if looks else "bOUT") or not kind:
        return None
    if getattr(value, "shape", ())[1:] not in ((), (1,)):
        return None
    values = np.asarray(value, object if kind in "OUT" else None)
    if values.dtype.kind not in "iufbOUT" or values.size != len(values) or not values.size:
        return None
    values = values.reshape(-1)
    are_indices = values.dtype.kind in "iuf" and (spec.classes is None or not (values >= spec.classes).any())
    if not _are_labels(values, spec, classes) or (classes is None and are_indices):
        return None
    numbers, classes = labelled(values, spec, classes, f"'{shown(spec.name)}'", whole=whole)
    if not classes.names and kind_of(values) == "number":
        return None
    return numbers.reshape((-1,) if len(spec.shape) == 1 else (-1, 1)), classes.of(spec.name)


def _are_labels(values: Array, spec: TensorSpec, classes: Classes | None) -> bool:
    """Whether a target's values are class labels, according to its spec or the known classes.

    For a numeric target, text with exactly two different values also counts as labels.
    """
    if takes_labels(spec) or (classes is not None and classes.names):
        return True
    return bool(values.size) and kind_of(values) == "text" and len(set(values.tolist())) == 2


def _columns(names: Sequence[str]) -> str:
    return f"column{'' if len(names) == 1 else 's'} {listed(names)}"

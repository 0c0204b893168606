"""Learning a preprocessing from the training table."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gradgraph.arguments import FLAG, NAMES, Kind, as_names, checked, instance, meant
from gradgraph.data.preprocess.column_kind import ColumnKind, centre, missing
from gradgraph.data.preprocess.column_kinds import KINDS, Category, Number
from gradgraph.data.preprocess.computed import Preprocessing
from gradgraph.data.preprocess.date_column import Date
from gradgraph.data.preprocess.date_forms import FORMS, DateForm, forms_of, looks_like_date, nearest
from gradgraph.data.preprocess.frames import (
    EXACT,
    GAP_WORDS,
    Array,
    Frame,
    are_dates,
    are_durations,
    are_numbers,
    as_typed,
    check_cells,
    column_text,
    durations_in,
    is_gap,
    is_table,
    numbers_of,
    text_of,
)
from gradgraph.data.preprocess.plan import Learnt
from gradgraph.errors import ArgumentError, DataError, listed, row_at, shown, suggestion

log = logging.getLogger("gradgraph")

MOST_CATEGORIES = 100  # text columns with more distinct values are hashed by word
MOST_CLASSES = 20  # maximum number of distinct integers treated as classes
FEWEST_IDS = 20  # from this number of rows on, distinct values may be ids
DISTINCT = "every row has a different value, as ids do,"
DAYS = "YYYYMMDD"
# codes (with leading zeros, or long), numbers with a decimal point, and numbers as people and spreadsheets write them:
# with a comma, thousands separators, a currency, a percent sign or brackets; also errors such as #DIV/0!
_CODE = re.compile(r"0[0-9]+|[0-9]{16,}", re.ASCII)
_POINT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_COMMA = re.compile(
    r"[+\-\u2212\u2013($\u20ac\u00a3\u00a5 \u00a0\u202f]{0,4}"
    r"(\d+([.,]\d+)?|\d{1,3}([.,' \u00a0\u2019\u202f]\d{3})+([.,]\d+)?)"
    r"[ \u00a0\u202f]{0,2}(%|\u2030|[$\u20ac\u00a3\u00a5]|EUR|USD|GBP|CHF)?[ \u00a0\u202f)\-]{0,2}|#[A-Z0/]+[!?]?",
    re.ASCII,
)
OVERRIDES = "a dict of columns and kinds, such as {'zip': 'category', 'notes': {'kind': 'text', 'buckets': 256}}"


TABLE = Kind(
    "a DataFrame of pandas or polars, an Arrow table, or a dict of columns, such as pandas.read_csv('train.csv')",
    lambda value: is_table(value) or isinstance(value, Mapping),
)


@checked(table=TABLE, target=NAMES.or_none(), kinds=instance(Mapping, OVERRIDES).or_none(), index=FLAG)
def fit(
    table: Any,
    target: str | Iterable[str] | None = None,
    kinds: Mapping[str, str | Mapping[str, Any]] | None = None,
    *,
    index: bool = False,
) -> Preprocessing:
    """Learn the preprocessing of a table's columns.

    Numbers are standardised, and missing ones imputed. Text with few distinct values is a category. Dates become
    the year and points on circles. Other text is hashed word by word. Pass training data only, since the model
    learns from all of it.

    Args:
        table: a DataFrame of pandas or polars, an Arrow table, or a dict of columns.
        target: target column(s). Text, booleans and integers with few distinct values are classes.
        kinds: the kind (``gradgraph.preprocess.KINDS``) of columns, to override the detected kind. For targets:
            ``"category"`` for classes, ``"number"`` for regression.
        index: output category indices, for embeddings, instead of one-hot vectors.

    Raises:
        DataError: a column is missing or invalid, or a target has missing values.
        BuildError: a kind or its argument is unknown.
    """
    frame, targets = Frame(table), as_names(target or [])
    given = {name: _written(name, kind) for name, kind in (kinds or {}).items()}
    for name in (*targets, *given):
        if name not in frame:
            raise DataError(f"the table has no column '{shown(name)}'{suggestion(name, list(frame))}")
    columns = {name: _learnt(name, frame[name], given.get(name), index) for name in frame if name not in targets}
    rows = len(frame[next(iter(frame))]) if frame.keys else 0
    learnt = {name: _target(name, frame[name], given.get(name)) for name in targets}
    _warn_of_oddities(frame, columns, targets)
    numbers, indices = (f"{name}_of_columns" if name in targets else name for name in ("x", "categories"))
    return Preprocessing(columns, learnt, rows, numbers, indices)  # a model may name its output like a target


def _written(name: str, kind: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and arguments of the kind that the user passed for column ``name``."""
    given = {"kind": kind} if isinstance(kind, str) else dict(kind)
    if "kind" not in given:
        raise DataError(f"the override of the column '{shown(name)}' has no 'kind'; add one of {listed(KINDS)}")
    return given.pop("kind"), given


def _learnt(name: str, values: Array, given: tuple[str, dict[str, Any]] | None, index: bool) -> ColumnKind:
    kind, arguments = given or (_looks_like(name, values), {})
    learn = KINDS.named(kind).learn
    known = [one for one in inspect.signature(learn).parameters if one not in ("column", "values")]
    for argument in arguments:
        if argument not in known:
            has = f"it has {listed(known)}" if known else "it has none"
            raise ArgumentError(
                f"columns of the kind {kind} have no argument '{shown(argument)}'{meant(argument, known) or f'; {has}'}"
            )
    if kind == Category.name:
        arguments = {"index": index, **arguments}
    learnt: ColumnKind = learn(name, values, **arguments)
    return learnt


def _looks_like(name: str, values: Array) -> str:
    """Return the name of the kind that suits a column's values."""
    if are_dates(values):
        return Date.name
    if are_numbers(values):
        return Date.name if _are_days(name, values) else Number.name
    texts = column_text(name, values).tolist()
    there = [text for text in texts if text]
    different = set(there)
    found = nearest(different)
    if found is not None and _are_written_dates(name, texts, *found):
        return Date.name
    if durations_in(values) is not None:
        log.info("the column '%s' contains durations such as %s, which are read as seconds", shown(name),
                 shown(repr(there[0])))  # fmt: skip
        return Number.name
    if not _warn_of_dates(name, texts):
        _warn_of_numbers(name, texts)
    words = sum(len(text.split()) for text in there)
    is_prose = words > 3 * len(there) and 2 * len(different) > len(there)
    return "text" if is_prose or len(different) > MOST_CATEGORIES else "category"


def _are_written_dates(name: str, texts: Sequence[str], form: DateForm, zone: bool) -> bool:
    """Whether all texts are dates in a format; log a warning if all but a few are."""
    there = [text for text in texts if text]
    wrong = [(row, text) for row, text in enumerate(texts) if text and form.read(text, zone) is None]
    if not wrong:
        is_padded = form.has_names or not form.is_short or all(len(text.split()[0]) == 8 for text in there)
        return is_padded and (form.name != DAYS or len(set(there)) > 1)
    if 10 * len(wrong) <= len(there) and form.name != DAYS:
        row, text = wrong[0]
        log.warning(
            "the column '%s' contains dates of the form %s, except for %d of %d values (the first is %s, in %s), so "
            "it is read as text; correct these, or leave them empty",
            shown(name), form.name, len(wrong), len(there), shown(repr(text)), row_at(row),
        )  # fmt: skip
    return False


def _warn_of_dates(name: str, texts: Sequence[str]) -> bool:
    """Warn if a text column looks like dates in an unsupported format, or like times; return whether it does."""
    there = [text for text in texts if text]
    odd = next((text for text in there if looks_like_date(text)), None)
    if odd is None or 10 * sum(map(looks_like_date, there)) < 9 * len(there):
        return False
    log.warning(
        "the column '%s' is read as text, but seems to contain dates or times, such as %s; write dates as 2024-05-31 "
        "or 2024-05-31 13:30, and times of the day as 13:30:00",
        shown(name), shown(repr(odd)),
    )  # fmt: skip
    return True


def _warn_of_numbers(name: str, texts: Sequence[str]) -> None:
    """Warn about a text column that looks numeric: quoted, with commas, or with a few words."""
    there = [(row, text) for row, text in enumerate(texts) if text]
    odd = [(row, text) for row, text in there if not _POINT.fullmatch(text)]
    words = sum(not _COMMA.fullmatch(text) for _, text in odd)
    if len(set(texts)) < 2 or 10 * words > len(there) or any(_CODE.fullmatch(text) for _, text in there):
        return
    if odd:
        row, text = odd[0]
        log.warning(
            "the column '%s' is read as text, not as numbers, because of %d of %d values (the first is %s, in %s); "
            "write numbers with a point for decimals and nothing between thousands, and leave missing values empty",
            shown(name), len(odd), len(there), shown(repr(text)), row_at(row),
        )  # fmt: skip
        return
    log.warning(
        "the column '%s' is read as text, since it contains numbers as text, such as %s; convert them to numbers, or "
        "use the kind 'number' or 'category'",
        shown(name), shown(repr(there[0][1])),
    )  # fmt: skip


def _are_days(name: str, values: Array) -> bool:
    """Whether all numbers are days such as 20240531, with at least two distinct ones."""
    if values.dtype.kind in "bm":
        return False
    try:
        there = values[~missing(numbers_of(name, values))].astype(np.float64)
    except (DataError, TypeError):
        return False  # raised when the column is read
    different = set(there.tolist())
    if not (len(different) > 1 and all(19_000_101 <= n <= 20_991_231 and n.is_integer() for n in different)):
        return False
    return all(FORMS[DAYS].read(str(int(n)), zone=False) is not None for n in different)


def _target(name: str, values: Array, given: tuple[str, dict[str, Any]] | None) -> Learnt:
    check_cells(f"the column '{shown(name)}'", values)
    gaps = sum(map(is_gap, values.tolist())) if values.dtype.kind not in "mM" else int(np.isnat(values).sum())
    if gaps:
        raise DataError(f"the target column '{shown(name)}' has {gaps} missing value{'' if gaps == 1 else 's'}; drop "
                        "those rows")  # fmt: skip
    values = as_typed(values)
    if given is None and _holds_dates(values):
        raise DataError(
            f"the target column '{shown(name)}' contains dates; predict a number derived from them, such as the days "
            "since the first one",
            remedy=f"or use kinds={{'{shown(name)}': 'category'}} if each is a class",
            shell=f"or use --column {shown(name)}=category if each is a class",
        )
    if given is None and (are_durations(values) or durations_in(values) is not None):
        raise DataError(
            f"the target column '{shown(name)}' contains durations; predict their seconds",
            remedy=f"set frame['{shown(name)}'] = pandas.to_timedelta(frame['{shown(name)}']).dt.total_seconds()",
            shell="save the column as numbers",
        )
    if given is None and not are_numbers(values):
        texts = column_text(name, values).tolist()
        if len(set(texts)) > MOST_CLASSES or not all(text.isdigit() for text in texts):  # "0" to "9" are classes
            _warn_of_numbers(name, texts)
    kind = (given or (Category.name if _are_classes(values) else Number.name, {}))[0]
    if kind == Category.name:
        return Learnt(tuple(sorted(set(text_of(values).tolist()), key=_order)))
    if kind != Number.name:
        raise DataError(f"the column '{shown(name)}' is a target, so its kind must be category or number")
    mean, std = centre(name, numbers_of(name, values))
    return Learnt((), mean, std)


def _holds_dates(values: Array) -> bool:
    if are_dates(values):
        return True
    texts = set() if are_numbers(values) else set(text_of(values).tolist())
    found = forms_of(texts)
    return bool(found) and not any((form.is_short and not form.has_names) or form.name == DAYS for form, _ in found)


def _are_classes(values: Array) -> bool:
    if values.dtype.kind == "b" or not are_numbers(values):
        return True
    most = max(2, min(MOST_CLASSES, int(len(values) ** 0.5)))
    return values.dtype.kind in "iu" and len(np.unique(values)) <= most


def _warn_of_oddities(frame: Frame, columns: Mapping[str, ColumnKind], targets: Iterable[str]) -> None:
    """Warn about useless columns and targets: constant, empty, or with a distinct value in each row."""
    found: dict[str, list[str]] = {}
    for name in (name for name, kind in columns.items() if kind.parts):
        if odd := _oddity(frame[name]):
            found.setdefault(odd, []).append(name)
    if found:
        said = "; ".join(f"{odd} in {listed(names)}" for odd, names in found.items())
        log.warning("%s: a model learns nothing from these columns; drop them, or give them the kind 'drop'", said)
    for name in targets:
        if odd := _oddity(frame[name]):
            log.warning("%s in the target '%s'; is it the right column?", odd, shown(name))


def _oddity(values: Array) -> str:
    """Return why a column is useless, such as "every value is the same"; empty if it is useful."""
    texts = text_of(values)
    there = [text for text in texts.tolist() if text not in GAP_WORDS]
    different = set(there)
    if not different:
        return "every value is missing" if len(values) else ""
    if len(different) == 1 and len(values) > 1:
        return "every value is the same"
    if len(different) < len(there) or len(there) < FEWEST_IDS or are_dates(values):
        return ""
    if are_numbers(values):
        if values.dtype.kind == "f" and not all(float(n).is_integer() for n in values[~np.isnan(values)]):
            return ""
        return DISTINCT if _are_ids(there) else ""
    words = sum(len(text.split()) for text in there)
    return DISTINCT if words < 2 * len(there) and not forms_of(different) else ""


def _are_ids(texts: Sequence[str]) -> bool:
    """Whether distinct integers look like ids: nearly consecutive in any order, or too large to be quantities."""
    try:
        numbers = [int(text) for text in texts]
    except ValueError:
        return False
    least, largest = min(numbers), max(numbers)
    return largest - least < 2 * len(numbers) or largest >= EXACT


def _order(name: str) -> tuple[bool, float, str]:
    """Return a sort key for class names: numbers by value, then text."""
    try:
        return False, float(name), name
    except ValueError:
        return True, 0.0, name

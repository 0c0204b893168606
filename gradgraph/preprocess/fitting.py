"""Learning what becomes of columns, from the table that a model is trained on, and from nothing else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gradgraph.arguments import FLAG, NAMES, Kind, as_names, bound, checked, instance
from gradgraph.errors import DataError, listed, shown, suggestion
from gradgraph.preprocess.column_kinds import DATE, KINDS, Category, ColumnKind, Number, _centre
from gradgraph.preprocess.computed import Preprocessing
from gradgraph.preprocess.frames import Array, Frame, are_numbers, is_gap, is_table, numbers_of, text_of
from gradgraph.preprocess.plan import Learnt

MOST_CATEGORIES = 100  # text of more different values is read by its words
MOST_CLASSES = 20  # of whole numbers that are classes
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
    """Learn what becomes of the columns of a table before a model reads them.

    Numbers are scaled, and their gaps filled; text of few different values is one of so many categories; dates become
    the year and points on circles; other text is hashed word by word. Give it training data alone: what it sees, the
    model knows.

    Args:
        table: a DataFrame of pandas or polars, an Arrow table, or a dict of columns.
        target: the column that is to be predicted, or several. Text, booleans and whole numbers of few different values
            are classes.
        kinds: of columns that are not what they look like (``gradgraph.preprocess.KINDS``), also of targets:
            ``"category"`` for classes, ``"number"`` for numbers.
        index: give the number of each category, for embeddings, and not a number for each of them.

    Raises:
        DataError: a column cannot be read so, has no such name, or a target has gaps.
        BuildError: there is no such kind, or it has no such argument.
    """
    frame, targets = Frame(table), as_names(target or [])
    given = {name: _written(name, kind) for name, kind in (kinds or {}).items()}
    for name in (*targets, *given):
        if name not in frame:
            raise DataError(f"the table has no column '{shown(name)}'{suggestion(name, list(frame))}")
    columns = {name: _learnt(name, frame[name], given.get(name), index) for name in frame if name not in targets}
    rows = len(frame[next(iter(frame))]) if frame.keys else 0
    learnt = {name: _target(name, frame[name], given.get(name)) for name in targets}
    numbers, indices = (f"{name}_of_columns" if name in targets else name for name in ("x", "categories"))
    return Preprocessing(columns, learnt, rows, numbers, indices)  # a model may call its output like a target


def _written(name: str, kind: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of a kind, and its arguments."""
    given = {"kind": kind} if isinstance(kind, str) else dict(kind)
    if "kind" not in given:
        raise DataError(f"the column '{shown(name)}' is given no kind; it is one of {listed(KINDS)}")
    return given.pop("kind"), given


def _learnt(name: str, values: Array, given: tuple[str, dict[str, Any]] | None, index: bool) -> ColumnKind:
    kind, arguments = given or (_looks_like(values), {})
    learn = KINDS.named(kind).learn
    if kind == Category.name:
        arguments = {"index": index, **arguments}
    signature = inspect.signature(learn)
    bound(learn, signature, (name, values), arguments)
    learnt: ColumnKind = learn(name, values, **arguments)
    return learnt


def _looks_like(values: Array) -> str:
    """The kind of a column of which nobody says it."""
    if values.dtype.kind == "M":
        return "date"
    if are_numbers(values):
        return "number"
    texts = [text for text in text_of(values).tolist() if text]
    different = set(texts)
    if texts and all(re.fullmatch(DATE, text) for text in different):
        return "date"
    words = sum(len(text.split()) for text in texts)
    is_prose = words > 3 * len(texts) and 2 * len(different) > len(texts)
    return "text" if is_prose or len(different) > MOST_CATEGORIES else "category"


def _target(name: str, values: Array, given: tuple[str, dict[str, Any]] | None) -> Learnt:
    gaps = sum(map(is_gap, values.tolist())) if values.dtype.kind not in "mM" else int(np.isnat(values).sum())
    if gaps:
        raise DataError(f"the column '{shown(name)}', which is to be predicted, has {gaps} missing "
                        f"value{'' if gaps == 1 else 's'}; leave those rows out")  # fmt: skip
    kind = (given or (Category.name if _are_classes(values) else Number.name, {}))[0]
    if kind == Category.name:
        return Learnt(tuple(sorted(set(text_of(values).tolist()), key=_order)))
    if kind != Number.name:
        raise DataError(f"the column '{shown(name)}' is to be predicted, so it is a category or a number")
    mean, std = _centre(name, numbers_of(name, values))
    return Learnt((), mean, std)


def _are_classes(values: Array) -> bool:
    if values.dtype.kind == "b" or not are_numbers(values):
        return True
    most = max(2, min(MOST_CLASSES, int(len(values) ** 0.5)))
    return values.dtype.kind in "iu" and len(np.unique(values)) <= most


def _order(name: str) -> tuple[bool, float, str]:
    """Numbers by what they are, then text."""
    try:
        return False, float(name), name
    except ValueError:
        return True, 0.0, name

"""A preprocessing plan: plain data, stored in step, checkpoint and model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

from gradgraph.data.preprocess.column_kind import ColumnKind
from gradgraph.data.preprocess.column_kinds import KINDS
from gradgraph.data.preprocess.drift import Drift
from gradgraph.data.preprocess.frames import Array, Frame, is_text
from gradgraph.errors import ArgumentError, DataError, UnmatchedError, counted, listed, shown

P = TypeVar("P", bound="Plan")

MOST_COLUMNS = 100_000


@dataclass(frozen=True)
class Learnt:
    """The parameters learnt for a target column: its classes, or its scale.

    Attributes:
        classes: class names, sorted; empty for regression.
        mean, std: for regression, mean and standard deviation of the training values.
    """

    classes: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))
        numbers = all(type(n) in (int, float) and -1e308 < n < 1e308 for n in (self.mean, self.std))
        if not numbers or self.std <= 0 or not all(map(is_text, self.classes)):
            raise ArgumentError("a target of the preprocessing has invalid parameters")


@dataclass(frozen=True)
class Plan:
    """The learnt preprocessing of a table as plain data; its subclass ``computed.Preprocessing`` applies it."""

    columns: Mapping[str, ColumnKind]
    targets: Mapping[str, Learnt] = field(default_factory=dict)
    rows: int = 0
    numbers: str = "x"
    indices: str = "categories"

    def __post_init__(self) -> None:
        if len(self.columns) > MOST_COLUMNS or not all(map(is_text, (*self.columns, *self.targets))):
            raise ArgumentError(f"the columns of the preprocessing should be names, at most {MOST_COLUMNS:,}")
        if type(self.rows) is not int or self.rows < 0:
            raise ArgumentError("the number of rows of the preprocessing should be an integer of at least 0")
        if not (is_text(self.numbers) and is_text(self.indices) and self.numbers != self.indices):
            raise ArgumentError("the inputs of the preprocessing should be two different names")
        if not self.read:
            raise ArgumentError("the preprocessing reads no column; provide one that is neither a target nor dropped")

    # --- what it produces -----------------------------------------------------------------------------------

    @property
    def read(self) -> dict[str, ColumnKind]:
        """The kinds of the columns that the model reads, by column name."""
        return {name: kind for name, kind in self.columns.items() if kind.parts}

    @property
    def features(self) -> dict[str, list[str]]:
        """The names of the features in each array that the preprocessing returns, by model input."""
        made: dict[str, list[str]] = {}
        for name, kind in self.read.items():
            own = made.setdefault(self.indices if kind.is_index else self.numbers, [])
            own += [f"{name}{part}" for part in kind.parts]
        return {name: made[name] for name in (self.numbers, self.indices) if name in made}

    def feeds(self, table: Any) -> dict[str, Array]:
        """Return the columns in the form that the nodes read: text, or float64.

        Raises:
            UnmatchedError: columns are missing.
            DataError: a column contains invalid values for its kind, or columns differ in length.
        """
        frame = Frame(table)
        if missing := [name for name in self.read if name not in frame]:
            new = [name for name in frame if name not in self.columns and name not in self.targets]
            has = f", and has the new {listed(new)}" if new else ""
            raise UnmatchedError(
                f"the table lacks the column{'' if len(missing) == 1 else 's'} {listed(missing)}, which the model "
                f"reads{has}; rename columns to their names in training"
            )
        feeds = {name: kind.read(name, frame[name]) for name, kind in self.read.items()}
        (first, values), *others = feeds.items()
        for name, column in others:
            if len(column) != len(values):
                raise DataError(
                    f"the column '{shown(name)}' has {counted(len(column), 'value')}, but '{shown(first)}' has "
                    f"{len(values):,}; provide one value per row in each"
                )
        return feeds

    def drift(self, table: Any) -> Drift:
        """Compare a later table with the training data, column by column.

        Raises:
            UnmatchedError, DataError: as for :meth:`feeds`.
        """
        return Drift.of(self.read, self.feeds(table))

    def holds_columns(self, data: Mapping[Any, Any]) -> bool:
        """Whether a dict contains the columns of a table, rather than the arrays that the preprocessing produces."""
        given = {str(name): value for name, value in data.items()}
        if self.features.keys() <= given.keys():
            return self.read.keys() <= given.keys() and all(np.ndim(given[name]) == 1 for name in self.features)
        return not self.read.keys().isdisjoint(given)

    def drawn(self, rng: np.random.Generator, rows: int) -> dict[str, Array]:
        """Return random columns, by name, in the form of :meth:`feeds`."""
        return {name: kind.draw(rng, rows) for name, kind in self.read.items()}

    def stands_before(self, ranks: Mapping[str, int]) -> bool:
        """Whether a model contains this preprocessing, i.e. its inputs (``ranks`` by name) are table columns.

        Columns have rank 1. Names are not sufficient, since a preprocessed array may have a column's name.
        """
        return all(ranks.get(name) == 1 for name in self.read)

    # --- serialisation --------------------------------------------------------------------------------------

    def as_data(self) -> dict[str, Any]:
        """Return plain dicts and lists for JSON."""
        targets = {n: {"classes": list(t.classes), "mean": t.mean, "std": t.std} for n, t in self.targets.items()}
        columns = {name: kind.as_data() for name, kind in self.columns.items()}
        return {
            "columns": columns,
            "targets": targets,
            "rows": self.rows,
            "numbers": self.numbers,
            "indices": self.indices,
        }

    @classmethod
    def from_data(cls: type[P], data: Any) -> P:
        """Return the plan in untrusted plain data; raises ArgumentError if it is invalid."""
        try:
            known = {f.name for f in fields(cls)}
            if stray := sorted(data.keys() - known):
                raise ArgumentError(f"the preprocessing has the unknown entry '{shown(stray[0])}'")
            columns = {name: _kind(**given) for name, given in data["columns"].items()}
            targets = {name: Learnt(**given) for name, given in data.get("targets", {}).items()}
            return cls(**{**data, "columns": columns, "targets": targets})
        except (TypeError, KeyError, AttributeError) as error:
            raise ArgumentError(f"the preprocessing is invalid ({shown(error)})") from None

    def __str__(self) -> str:
        lines = [f"{name}: {kind.name}, {_many(len(kind.parts))}" for name, kind in self.columns.items()]
        return "\n".join([*lines, *(f"{name}: {_said(learnt)}" for name, learnt in self.targets.items())])


def _many(count: int) -> str:
    return "not read" if not count else f"{count} number{'' if count == 1 else 's'}"


def _said(learnt: Learnt) -> str:
    if not learnt.classes:
        return f"target, numbers with mean {learnt.mean:.6g} and standard deviation {learnt.std:.6g}"
    return f"target, one of {len(learnt.classes)} classes: {listed(learnt.classes)}"


def _kind(kind: str, **given: Any) -> ColumnKind:
    if kind not in KINDS:
        raise ArgumentError(f"there is no kind of column '{shown(kind)}'{KINDS.hint(str(kind))}")
    made: ColumnKind = KINDS[kind](**given)
    return made

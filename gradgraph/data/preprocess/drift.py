"""Drift of a later table from the training data: new categories, more missing values, values out of range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gradgraph.data.preprocess.column_kind import ColumnKind, missing
from gradgraph.data.preprocess.frames import Array
from gradgraph.errors import shown

EXAMPLES = 3
MOST_NAMED = 8  # columns listed in one line
DEVIATIONS = 4  # standard deviations by which a fraction may exceed that of the training data by chance


@dataclass(frozen=True)
class ColumnDrift:
    """The differences of a later table's column from the training data.

    Attributes:
        column: name of the column.
        kind: name of its kind.
        rows: number of rows of the later table.
        missing, missing_in_training: fractions of missing values.
        unseen, unseen_in_training: fractions of values that are new categories, or outside the training range by more
            than half of it (numbers and dates). Rare categories without a slot count in both.
        examples: some of the unseen values.
        range: the training values, in words.
    """

    column: str
    kind: str
    rows: int
    missing: float
    missing_in_training: float
    unseen: float
    unseen_in_training: float
    examples: tuple[str, ...]
    range: str

    @property
    def has_more_gaps(self) -> bool:
        """Whether there are more missing values than chance explains."""
        return _is_more(self.missing, self.missing_in_training, self.rows)

    @property
    def has_unseen(self) -> bool:
        """Whether there are more unseen values than chance explains; any at all, if the training data had none."""
        return _is_more(self.unseen, self.unseen_in_training, self.rows)

    def __str__(self) -> str:
        parts = []
        if self.has_unseen:
            such = ", ".join(self.examples)
            what = "new" if self.kind == "category" else f"far outside {self.range}"
            parts.append(f"{_percent(self.unseen)} {what} ({such})")
        if self.has_more_gaps:
            parts.append(f"{_percent(self.missing)} missing ({_percent(self.missing_in_training)} in training)")
        return f"'{shown(self.column)}' {', '.join(parts)}" if parts else ""


@dataclass(frozen=True)
class Drift:
    """The differences of a later table from the training data, column by column.

    Attributes:
        columns: all columns that the model reads.
    """

    columns: tuple[ColumnDrift, ...]

    @classmethod
    def of(cls, kinds: Mapping[str, ColumnKind], feeds: Mapping[str, Array]) -> Drift:
        """Compare columns, as returned by ``Plan.feeds``, with the training data."""
        return cls(tuple(_compared(name, kinds[name], values) for name, values in feeds.items()))

    def __str__(self) -> str:
        """Describe all differences in one line; empty if nothing differs."""
        said = list(filter(None, map(str, self.columns)))
        more = f"; and {len(said) - MOST_NAMED} more columns" if len(said) > MOST_NAMED else ""
        return f"not seen in training: {'; '.join(said[:MOST_NAMED])}{more}" if said else ""

    def as_data(self) -> list[dict[str, Any]]:
        """Return plain data for JSON: the fractions of each column, and whether it differs."""
        return [
            {**asdict(one), "examples": list(one.examples), "differs": one.has_unseen or one.has_more_gaps}
            for one in self.columns
        ]

    def as_rows(self) -> list[list[str]]:
        """Return a table of text, with a header."""
        head = ["column", "kind", "missing", "in training", "unseen", "in training", "training values"]
        return [head, *([shown(one.column), one.kind, _percent(one.missing), _percent(one.missing_in_training),
                         _percent(one.unseen), _percent(one.unseen_in_training), one.range]
                        for one in self.columns)]  # fmt: skip


def _compared(name: str, kind: ColumnKind, values: Array) -> ColumnDrift:
    gap, unseen = missing(values), kind.unseen(values)
    rows = max(len(values), 1)
    different = dict.fromkeys(values[unseen].tolist()) if unseen.any() else {}
    examples = tuple(shown(repr(v) if isinstance(v, str) else f"{v:.6g}") for v in list(different)[:EXAMPLES])
    return ColumnDrift(name, kind.name, len(values), float(gap.sum()) / rows, kind.gaps, float(unseen.sum()) / rows,
                       kind.others, examples, kind.range)  # fmt: skip


def _is_more(found: float, known: float, rows: int) -> bool:
    return found > known + DEVIATIONS * math.sqrt(known * (1 - known) / max(rows, 1))


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"

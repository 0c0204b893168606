"""The monitored column of the history, and the direction of improvement."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gradgraph.arguments import Kind
from gradgraph.errors import DataError, shown, suggestion

# common names of custom metrics; metrics of gradgraph.metrics declare their direction themselves
BETTER = {**dict.fromkeys(("acc", "auc", "psnr", "ssim", "bleu", "reward"), "max"),
          **dict.fromkeys(("loss", "error", "nll"), "min")}  # fmt: skip
MODE = Kind("'min', 'max' or None", lambda value: value in ("min", "max", None))


@dataclass(frozen=True)
class Monitor:
    """A monitored column and the comparison of its values.

    Attributes:
        column: name of the column; by default ``val_loss`` if it exists, else ``loss``.
        mode: ``"min"`` or ``"max"``; by default derived from the words of the column name.
        min_delta: minimum change that counts as an improvement.
    """

    column: str | None = None
    mode: str | None = None
    min_delta: float = 0.0

    def of(self, columns: Collection[str]) -> str:
        """Return the name of the monitored column in a history with these columns.

        If ``column`` is ``<metric>.<class index>``, the result contains the class name instead.
        """
        if self.column is None:
            return "val_loss" if "val_loss" in columns else "loss"
        stem, _, number = self.column.rpartition(".")
        of_classes = [column for column in columns if column.startswith(f"{stem}.")]  # in the order of class indices
        is_number = self.column not in columns and number.isdecimal() and int(number) < len(of_classes)
        return of_classes[int(number)] if is_number else self.column

    def value(self, row: Mapping[str, float]) -> float:
        """Return the monitored column's value in a history row; raise DataError if the row does not have it."""
        name = self.of(row)
        if name not in row:
            raise DataError(f"the history has no column '{shown(name)}' to monitor{suggestion(name, row)}")
        return row[name]

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether ``value`` is better than ``best``; any number is better than NaN and None."""
        if best is None:
            return True
        if math.isnan(best) or math.isnan(value):
            return math.isnan(best) and not math.isnan(value)
        return self.sign * value < self.sign * best - self.min_delta

    @property
    def sign(self) -> float:
        """1 if lower values are better, −1 if higher values are better.

        Raises:
            DataError: if ``mode`` is not set, and the column name does not imply a direction.
        """
        if self.mode is not None:
            return -1.0 if self.mode == "max" else 1.0
        words = set(re.split(r"[^a-z0-9]+", (self.column or "loss").lower()))
        said: set[str | None] = {mode for word, mode in BETTER.items() if word in words}
        if "min" not in said:
            from gradgraph.metrics import METRICS

            said |= {make().better for name, make in METRICS.items() if words.issuperset(name.split("_"))}
        if said - {None}:
            return 1.0 if "min" in said else -1.0
        raise DataError(
            f"the name '{shown(self.column)}' does not imply whether higher or lower values are better",
            remedy="pass mode='max' or mode='min'",
            shell="add --mode max or --mode min",
        )

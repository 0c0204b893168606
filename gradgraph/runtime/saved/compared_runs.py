"""Comparison of the runs in a folder: their metrics, and the options in which they differ."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradgraph.errors import DataError, shown, suggestion
from gradgraph.files.path_kinds import RECIPE, Kind, kind_of, named_by_run
from gradgraph.files.untrusted.documents import csv_rows, json_of, toml_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes
from gradgraph.runtime.saved.curves import INDEX, Curve, Panel, axis_of, panels_of
from gradgraph.runtime.saved.history import History
from gradgraph.runtime.saved.monitor import Monitor
from gradgraph.runtime.saved.printed import clock

LARGEST_LOG = 64 << 20  # bytes of a history or log to read
DEEPEST = 3  # levels below the given folder
_PLACES = ("output",)  # tables of a recipe that contain output paths
_UNCLEAR = ("name", "path", "options", "groups")  # keys of a recipe that say nothing without their table


@dataclass
class Run:
    """A run read from its folder.

    Attributes:
        name: path of the run's folder, relative to the folder of all runs.
        history: one row per epoch or evaluation, also of an unfinished run.
        seconds: training time; None if not logged.
        epochs: epochs requested.
        kept: index of the history row of the saved weights: the best with early stopping, else the last.
        best: the monitored column and its best value; None if unknown.
        sign: 1 if lower values of the monitored column are better, else −1.
        options: options of the recipe by ``table.key``.
    """

    name: str
    history: History
    seconds: float | None = None
    epochs: int | None = None
    kept: int = -1
    best: tuple[str, float] | None = None
    sign: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        """Return losses and metrics of the history row ``kept``, by column.

        For a run with validation data, training metrics other than losses are omitted.
        """
        if not self.history:
            return {}
        row = {n: v for n, v in self.history.row(self.kept).items()
               if n not in INDEX and n.rpartition(".")[2] != "learning_rate"}  # fmt: skip
        held_out = [name for name in row if name.startswith("val_")]
        return {n: v for n, v in row.items() if not held_out or n in held_out or n.rpartition(".")[2] == "loss"}

    def as_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        done = self.history.row() if self.history else {}
        return {
            "run": self.name, "epochs": int(done.get("epoch", 0)), "of": self.epochs, "steps": int(done.get("step", 0)),
            "seconds": self.seconds, **self.figures(),
            "best": None if self.best is None else {"column": self.best[0], "value": self.best[1]},
        }  # fmt: skip


def runs_in(folder: str | os.PathLike[str]) -> list[Run]:
    """Return the runs in ``folder`` and its subfolders, by name; or the run in ``folder`` itself.

    Raises:
        DataError: if there are no runs.
    """
    top = Path(folder)
    found = [_run(path, str(path.relative_to(top)) if path != top else path.absolute().name) for path in _folders(top)]
    if not found:
        raise DataError(
            f"'{shown(top)}' contains no run",
            remedy="give the folder that contains the folders of runs",
            shell="give the folder that contains the folders written by `gradgraph train --run`",
        )
    return sorted(found, key=lambda run: run.name)


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the options in which ``runs`` differ, with the value of each run; None if its recipe lacks the option.

    Options are named by their key (``lr``), or by ``table.key`` (``loss.name``) if the key alone is unclear or occurs
    in several tables of the recipes.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.options))
    values = {name: [run.options.get(name) for run in runs] for name in names}
    tables = Counter(_key(name) for name in names)
    return {
        name if tables[_key(name)] > 1 or _key(name).partition(".")[0] in _UNCLEAR else _key(name): column
        for name, column in values.items()
        if any(value != column[0] for value in column)
    }


def _key(name: str) -> str:
    """Return ``key`` for an option named ``table.key``; other names are returned unchanged."""
    return name.partition(".")[2] or name


def table_of(runs: Sequence[Run]) -> list[list[str]]:
    """Return a table of texts, with a header and one row per run.

    Columns are the run's name, epochs, steps, time, metrics, best value, and the options in which runs differ.
    """
    figures = list(dict.fromkeys(name for run in runs for name in run.figures()))
    options, is_any_best = differing(runs), any(run.best and run.kept == -1 for run in runs)
    rows = [["run", "epochs", "steps", "time", *figures, *(["best"] if is_any_best else []), *options]]
    for i, run in enumerate(runs):
        data, own = run.as_data(), run.figures()
        of = f"/{run.epochs}" if isinstance(run.epochs, int) and run.epochs > data["epochs"] else ""
        best = [f"{run.best[0]} {run.best[1]:.4g}" if run.best else ""] if is_any_best else []
        numbers = [f"{own[name]:.4g}" if name in own else "" for name in figures]
        time = "" if run.seconds is None else clock(run.seconds)
        rows.append([run.name, f"{data['epochs']}{of}", f"{data['steps']:,}", time, *numbers, *best,
                     *(_said(values[i]) for values in options.values())])  # fmt: skip
    return rows


def _said(value: Any) -> str:
    return "" if value in (None, []) else value if isinstance(value, str) else json.dumps(value)


def sorted_by(runs: Sequence[Run], column: str | None = None) -> list[Run]:
    """Sort runs, best first, by ``column`` or the column that most monitor; raise DataError if no run has it."""
    known = ["run", "epochs", "steps", "seconds", *dict.fromkeys(name for run in runs for name in run.figures())]
    watched = Counter(run.best[0] for run in runs if run.best)
    chosen = column or max(watched, key=lambda name: (watched[name], name.startswith("val_")), default="run")
    if chosen not in known:
        raise DataError(f"the runs have no column '{shown(chosen)}' to sort by{suggestion(chosen, known)}")
    sign = next((run.sign for run in runs if run.best and run.best[0] == chosen), 1.0)
    with contextlib.suppress(DataError):  # keep the sign if the name implies no direction
        sign = Monitor(chosen).sign
    values = {run.name: run.as_data().get(chosen) for run in runs}

    def key(run: Run) -> tuple[bool, Any]:
        value = values[run.name]
        if isinstance(value, str):
            return False, value
        return (True, 0.0) if value is None or math.isnan(value) else (False, sign * value)

    return sorted(runs, key=key)


def panels(runs: Sequence[Run]) -> list[Panel]:
    """Return one panel per history column with the curves of all runs, losses first."""
    found: dict[str, list[Curve]] = {}
    labels: dict[str, tuple[int, str, str]] = {}
    over = "step" if any(axis_of(run.history) == "step" for run in runs) else "epoch"
    for run in runs:
        kept = None if run.kept == -1 else run.kept
        for rank, panel in enumerate(panels_of(run.history, kept, over)):
            for curve in panel.curves:
                found.setdefault(curve.name, []).append(Curve(run.name, curve.x, curve.y, curve.kept))
                labels.setdefault(curve.name, (rank, panel.x_label, panel.y_label))
    order = sorted(found, key=lambda name: (labels[name][0], not name.startswith("val_")))
    return [Panel(name, *labels[name][1:], found[name]) for name in order]


# --- reading ------------------------------------------------------------------------------------------------


def _folders(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Yield the run folders in ``folder``; folders within a run are not searched."""
    if kind_of(folder) is Kind.RUN:
        yield folder
    elif depth <= DEEPEST:
        with contextlib.suppress(OSError):
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    yield from _folders(Path(entry.path), depth + 1)


def _run(path: Path, name: str) -> Run:
    tables: dict[str, Any] = {}
    with contextlib.suppress(UnreadableError):
        tables = toml_of(regular_bytes(path / RECIPE, 1 << 20))
    training = tables.get("training", {}) if isinstance(tables.get("training"), dict) else {}
    rows, seconds = _logged(path / "log.jsonl")
    history = _stored(named_by_run(path, "output", "history") or path / "history.csv") or rows
    run = Run(name, history, seconds, training.get("epochs"), options=dict(_flat(tables)))
    given = {key: training[key] for key in ("monitor", "mode") if isinstance(training.get(key), str)}
    monitor = Monitor(given.get("monitor"), given.get("mode"))
    column = monitor.of(history)
    values = [v for v in history.get(column, ()) if math.isfinite(v)]
    with contextlib.suppress(DataError):
        if values:
            best = min(values, key=lambda value: monitor.sign * value)
            run.best, run.sign = (column, best), monitor.sign
            run.kept = history[column].index(best) if training.get("patience") else -1
    return run


def _flat(tables: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the options of a recipe as pairs (``table.key``, value); absolute paths are reduced to file names."""
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from () if key in _PLACES and not place else _flat(value, f"{place}{key}.")
        else:
            is_path = isinstance(value, str) and os.sep in value and Path(value).is_absolute()
            yield f"{place}{key}", Path(value).name if is_path else value


def _stored(path: Path) -> History | None:
    """Return the history in the CSV file ``path``, written by a finished run; None if it cannot be read."""
    with contextlib.suppress(UnreadableError, ValueError):
        columns, rows = csv_rows(regular_bytes(path, LARGEST_LOG).decode("utf-8"))
        return History({name: [float(row[name]) for row in rows] for name in columns}) if rows else None
    return None


def _logged(path: Path) -> tuple[History, float | None]:
    """Return the history rows in the log file ``path``, and the total time of its fits in seconds (None if unknown)."""
    history, spent, last = History(), 0.0, None
    try:
        lines = regular_bytes(path, LARGEST_LOG).decode("utf-8").splitlines()
    except (UnreadableError, UnicodeDecodeError):
        return history, None
    for line in lines:
        with contextlib.suppress(UnreadableError):
            record = json_of(line)
            if not isinstance(record, dict):
                continue
            numbers = {n: float(v) for n, v in record.items() if isinstance(v, int | float)}
            seconds = numbers.pop("seconds", None)
            if seconds is not None:
                spent, last = spent + (last or 0.0) * (last is not None and seconds < last), seconds
            if record.get("event") in ("epoch", "eval"):
                history.append(numbers)
    return history, None if last is None else spent + last

"""Training logs: JSON lines, CSV, TensorBoard, or a user's object.

A record is a dict for a step or a history row. A beginning fit removes records of later steps from a log file, so a
resumed run writes no duplicates, and a new run starts with an empty file. Write errors are logged once, not raised.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gradgraph.arguments import Kind
from gradgraph.errors import OutputError, RuntimeUnavailableError, shown
from gradgraph.files.atomic import write_atomically
from gradgraph.files.untrusted.documents import Fields, csv_rows, json_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes
from gradgraph.runtime.loop.moving import last_rates
from gradgraph.runtime.saved.record import Progress
from gradgraph.step.manifest import Manifest

log = logging.getLogger("gradgraph")

Record = dict[str, Any]


def _fits(value: Any) -> bool:
    if isinstance(value, str | os.PathLike) or hasattr(value, "write"):
        return True
    return isinstance(value, list | tuple) and all(map(_fits, value))


LOGS = Kind(
    "a path (.jsonl, .csv, or a folder for TensorBoard), an object with write(record), or a list of them", _fits
)


def writers(given: Any) -> list[Any]:
    """Return the writers for ``given``, the argument of ``fit(log=...)``.

    A writer is an object with a method ``write``, and optionally ``begin`` and ``close``.
    """
    if given is None:
        return []
    return [_writer(each) for each in (given if isinstance(given, list | tuple) else [given])]


def _writer(given: Any) -> Any:
    if not isinstance(given, str | os.PathLike):
        return given
    path = Path(given)
    kinds = {".jsonl": JsonLines, ".csv": Csv, "": TensorBoard}
    if path.suffix not in kinds:
        raise OutputError(
            f"the log '{shown(path)}' should end in .jsonl or .csv, or have no extension (a folder for TensorBoard)"
        )
    return kinds[path.suffix](path)


_OF_ROWS = ("epoch", "eval", "preferences")  # events of records that are written with a history row


class Lines:
    """The base class of writers of text log files with one record per line, flushed after each record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    def begin(self, step: int, row: int | None = None) -> None:
        """Open the file for appending, after removing records of later steps, which this fit writes again.

        Args:
            step: the last step whose record is kept.
            row: the step of the last history row whose record is kept; by default ``step``.

        Raises:
            OutputError: if the file cannot be written.
        """
        last = step if row is None else row
        kept = self._kept(lambda event, s: 0 < s <= (last if event in _OF_ROWS else step))
        write_atomically(self.path, kept.encode())
        self.go_on()

    def go_on(self) -> None:
        """Open the log for appending, as it is."""
        self._file = self.path.open("a", encoding="utf-8", newline="")

    def write(self, record: Record) -> None:
        self._file.write(self._line(record))
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _old(self) -> str:
        with contextlib.suppress(ValueError):
            return regular_bytes(self.path).decode("utf-8")
        return ""

    def _kept(self, keeps: Callable[[Any, int], bool]) -> str:
        """Return the existing lines whose record satisfies ``keeps(event, step)``, as one text."""
        raise NotImplementedError

    def _line(self, record: Record) -> str:
        raise NotImplementedError


class JsonLines(Lines):
    """A writer of JSON Lines files; non-finite numbers are written as null."""

    def _kept(self, keeps: Callable[[Any, int], bool]) -> str:
        return "".join(f"{line}\n" for line in self._old().splitlines() if keeps(*_place_of(line)))

    def _line(self, record: Record) -> str:
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        return json.dumps(plain) + "\n"


def _place_of(line: str) -> tuple[Any, int]:
    """Return the event and the step of the JSON record ``line``; (None, 0) if the line is not a record."""
    try:
        record = json_of(line)
        return record.get("event") if isinstance(record, dict) else None, Fields(record, "it").whole("step")
    except UnreadableError:
        return None, 0


_STEP = re.compile("[0-9]{1,15}")


class Csv(Lines):
    """A writer of CSV files with a header, rewritten for a record with new columns."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._columns: list[str] = []

    def _kept(self, keeps: Callable[[Any, int], bool]) -> str:
        columns, rows = self._rows()
        kept = [
            row for row in rows if _STEP.fullmatch(row.get("step") or "") and keeps(row.get("event"), int(row["step"]))
        ]
        self._columns = [c for c in columns if c] if kept else []
        return self._table(kept)

    def write(self, record: Record) -> None:
        new = [name for name in record if name not in self._columns]
        if new:
            _, rows = self._rows()
            self._columns += new
            self.close()
            try:
                write_atomically(self.path, self._table(rows).encode())
            finally:
                self.go_on()
        super().write(record)

    def _rows(self) -> tuple[list[str], list[dict[str, str]]]:
        """Return the column names and rows of the existing file; both empty if it is not a CSV table."""
        try:
            return csv_rows(self._old())
        except UnreadableError:
            return [], []

    def _table(self, rows: Iterable[Mapping[str, Any]]) -> str:
        if not self._columns:
            return ""
        header = dict(zip(self._columns, self._columns, strict=True))
        return "".join(map(self._line, [header, *rows]))

    def _line(self, record: Mapping[str, Any]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, restval="", extrasaction="ignore", lineterminator="\n").writerow(record)
        return text.getvalue()


class TensorBoard:
    """A writer of TensorBoard event files.

    Tags are ``train/…`` for steps, ``epoch/…`` (or ``eval/…``) for history rows, and ``val/…`` for validation results.

    Raises:
        RuntimeUnavailableError: if tensorboardX is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import tensorboardX
        except ImportError:
            raise RuntimeUnavailableError("TensorBoard logs need tensorboardX; pip install tensorboardX") from None
        self._make, self.folder = tensorboardX.SummaryWriter, folder
        self._events: Any = None

    def begin(self, step: int) -> None:
        try:
            self._events = self._make(str(self.folder), purge_step=step + 1 if step else None)
        except OSError as error:
            raise OutputError(f"'{shown(self.folder)}' cannot be written ({error.strerror}); check the path") from None

    def write(self, record: Record) -> None:
        group = "train" if record["event"] == "step" else record["event"]
        for name, value in record.items():
            if name not in ("event", "step", "epoch"):
                tag = f"val/{name.removeprefix('val_')}" if name.startswith("val_") else f"{group}/{name}"
                self._events.add_scalar(tag, value, record["step"])
        self._events.flush()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


class Logs:
    """The logs of one fit.

    Args:
        every: number of steps between records.
        progress, manifest: progress of the run, and manifest of the step.
        scaling: returns the loss scale and related columns.
    """

    def __init__(
        self,
        given: Any,
        every: int,
        progress: Progress,
        manifest: Manifest,
        scaling: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._writers, self._every, self._scaling = writers(given), every, scaling
        self._progress, self._manifest = progress, manifest
        self._since = self._began = time.perf_counter()
        self._rows = 0
        self._seen = progress.steps // every  # step records due so far in this run
        self._failed: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._writers)

    def begin(self) -> None:
        """Open the logs before the first step; raise OutputError if a log cannot be written."""
        p = self._progress
        for writer in self._writers:
            if isinstance(writer, Lines):
                writer.begin(p.steps, max(p.fit_step, *(int(step) for step in p.history.get("step", ())[-1:]), 0))
            elif hasattr(writer, "begin"):
                writer.begin(p.steps)
        self._since = self._began = time.perf_counter()

    def step(self, rows: int, results: Mapping[str, float]) -> None:
        """Count a step with its ``results``, and write a record if one is due."""
        self._rows += rows
        p = self._progress
        if p.steps // self._every == self._seen:
            return
        self._seen = p.steps // self._every
        now = time.perf_counter()
        rate = self._rows / max(now - self._since, 1e-9)
        self._since, self._rows = now, 0
        self._write({"event": "step", "epoch": p.epoch + 1, "step": p.steps, "seconds": now - self._began,
                     **{name: float(value) for name, value in results.items()}, **last_rates(self._manifest, p),
                     **self._scaling(), "samples_per_second": rate, **memory()})  # fmt: skip

    def row(self, row: Mapping[str, float], event: str) -> None:
        """Write a record of a history row; ``event`` is "epoch" or "eval"."""
        whole = {"epoch": int(row["epoch"]), "step": int(row["step"])}
        seconds = time.perf_counter() - self._began
        self._write(
            {"event": event, **whole, "seconds": seconds, **{n: float(v) for n, v in row.items() if n not in whole}}
        )

    def close(self) -> None:
        for writer in self._writers:
            if hasattr(writer, "close"):
                with contextlib.suppress(OSError):
                    writer.close()

    def _write(self, record: Record) -> None:
        for i, writer in enumerate(self._writers):
            try:
                writer.write(dict(record))
            except OSError as error:
                if i not in self._failed:
                    self._failed.add(i)
                    log.error("the log cannot be written (%s); training continues", shown(error))


def memory() -> dict[str, float]:
    """Return ``{"memory_mib": …}``, the resident memory of this process, its peak if only that is known, or {}."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"memory_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20}
    peak = peak_memory()
    return {"memory_mib": peak["peak_memory_mib"]} if peak else {}


def peak_memory() -> dict[str, float]:
    """Return ``{"peak_memory_mib": …}``, the peak memory of this process; empty if unknown."""
    with contextlib.suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_memory_mib": peak / (2**20 if sys.platform == "darwin" else 1024)}
    return {}

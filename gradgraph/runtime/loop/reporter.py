"""Telling people how training goes, on stderr: a bar on a terminal, plain lines elsewhere.

Where stderr cannot be written (a log on a full disk, a terminal that is gone), nothing is told, and training goes on.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO, cast

from gradgraph.errors import shown
from gradgraph.runtime.loop.course import Course

REFRESH = 0.1  # seconds between updates of the bar
PLAIN_EVERY = 10.0  # seconds between plain lines within an epoch
SLOW = 2.0  # seconds of preparation after which it is told


class Reporter:
    """``fit`` tells a reporter how it goes; this one is silent."""

    def step(self, epoch: int, done: int, total: int | None, rows: int, results: Mapping[str, Any]) -> None: ...

    def epoch(self, row: Mapping[str, float]) -> None: ...

    def say(self, sentence: str) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def told_if_slow(sentence: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say ``sentence`` while the body still runs, if it takes longer than ``SLOW``."""
    timer = threading.Timer(SLOW, say, [sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def reporter(progress: bool | None, course: Course) -> Reporter:
    """A bar if stderr is a terminal, else plain lines, or nothing for ``progress=False``."""
    if progress is False:
        return Reporter()
    if sys.stderr.isatty():
        from rich.console import Console

        console = Console(file=cast(TextIO, _Forgiving(sys.stderr)))
        if not console.is_dumb_terminal:
            return Bar(console, course)
    return Plain(course)


class Plain(Reporter):
    """One line per epoch, and one every ten seconds within a long one."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._last = time.monotonic()
        self._rows = 0

    def step(self, epoch: int, done: int, total: int | None, rows: int, results: Mapping[str, Any]) -> None:
        if not self._course.is_begun:
            self._course.begin(epoch, done, total)
        self._rows += rows
        now = time.monotonic()
        if now - self._last < PLAIN_EVERY:
            return
        rate = self._rows / (now - self._last)
        self._last, self._rows = now, 0
        of = f"/{total}" if total else ""
        self.say(_joined(f"{self._course.name(epoch)}: batch {done}{of}", _values(results), f"{rate:.0f} samples/s",
                         self._course.left(epoch, done)))  # fmt: skip

    def epoch(self, row: Mapping[str, float]) -> None:
        epoch = int(row["epoch"])
        where = f"{self._course.name(epoch - 1)}: step {row['step']:.0f}"
        self.say(_joined(where, _values(row), self._course.left(epoch, 0) if epoch != self._course.epochs else ""))

    def say(self, sentence: str) -> None:
        print(sentence, file=_Forgiving(sys.stderr), flush=True)


class Bar(Reporter):
    """A rich progress bar: loss and metrics of the last step, samples per second, time left of the whole fit."""

    def __init__(self, console: Any, course: Course) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._course = course
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),  # narrower where the line is short; the texts stay
            TextColumn("{task.fields[done]} batches", markup=False),
            TextColumn("{task.fields[values]}", markup=False),
            console=console,
            auto_refresh=False,
        )
        self._task: Any = None
        self._epoch = -1
        self._total: int | None = None
        self._last = 0.0
        self._since = time.monotonic()
        self._rows = 0
        self._rate = 0.0
        self._bar.start()

    def step(self, epoch: int, done: int, total: int | None, rows: int, results: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if epoch != self._epoch:
            self._begin(epoch, done, total)
        self._rows += rows
        if now - self._last < REFRESH and done != total:
            return
        if now - self._since > 1.0 or not self._rate:
            self._rate = self._rows / max(now - self._since, 1e-9)
            self._since, self._rows = now, 0
        self._last = now
        values = _joined(_values(results), f"{self._rate:.0f} samples/s", self._course.left(epoch, done))
        self._bar.update(self._task, completed=done, done=self._done(done), values=values, refresh=True)

    def _begin(self, epoch: int, done: int, total: int | None) -> None:
        if not self._course.is_begun:
            self._course.begin(epoch, done, total)
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._epoch, self._total = epoch, total
        self._task = self._bar.add_task(self._course.name(epoch), total=total, done=self._done(0), values="")

    def _done(self, done: int) -> str:
        return f"{done}/{self._total}" if self._total else str(done)

    def epoch(self, row: Mapping[str, float]) -> None:
        self.say(f"{self._course.name(int(row['epoch']) - 1)}  {_values(row)}")

    def say(self, sentence: str) -> None:
        from rich.text import Text

        self._bar.console.print(Text(sentence), soft_wrap=True)

    def close(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        self._bar.stop()


class _Forgiving:
    """A stream whose errors are passed over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _joined(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def _values(values: Mapping[str, Any]) -> str:
    return "  ".join(f"{shown(name)} {float(v):.4g}" for name, v in values.items() if name not in ("epoch", "step"))

"""Progress output on stderr: a progress bar on a terminal, otherwise plain lines.

Errors when writing to stderr (a full disk, a closed terminal) are ignored, and training continues.
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
Rates = Callable[[], Mapping[str, float]]
PLAIN_EVERY = 10.0  # seconds between plain lines within an epoch
SLOW = 2.0  # seconds of preparation after which it is reported


class Reporter:
    """The interface for progress output; this base class prints nothing."""

    def step(self, epoch: int, done: int, total: int | None, rows: int, results: Mapping[str, Any]) -> None:
        """Report a step: batch ``done`` of ``total`` in ``epoch`` (from 0), with ``rows`` samples."""

    def row(self, row: Mapping[str, float], done: int, ends_epoch: bool) -> None:
        """Report a history row after batch ``done``."""

    def say(self, sentence: str) -> None:
        """Print a sentence."""

    def close(self) -> None:
        """Finish the progress output, such as an unfinished progress bar."""


@contextlib.contextmanager
def told_if_slow(sentence: str, say: Callable[[str], None]) -> Iterator[None]:
    """Run a block; if it takes longer than ``SLOW`` seconds, call ``say(sentence)`` while it is still running."""
    timer = threading.Timer(SLOW, say, [sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def reporter(progress: bool | None, course: Course, rates: Rates = dict) -> Reporter:
    """Return a progress bar if stderr is a terminal, otherwise plain lines; with ``progress=False``, no output.

    ``rates`` returns the hyperparameters of the last step.
    """
    if progress is False:
        return Reporter()
    if sys.stderr.isatty():
        from rich.console import Console

        console = Console(file=cast(TextIO, _Forgiving(sys.stderr)))
        if not console.is_dumb_terminal:
            return Bar(console, course, rates)
    return Plain(course, rates)


class Plain(Reporter):
    """A reporter that prints plain lines: one per history row, and one every ten seconds in between."""

    def __init__(self, course: Course, rates: Rates = dict) -> None:
        self._course, self._rates = course, rates
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
        self.say(_joined(f"{self._course.name(epoch)}: batch {done}{of}", *_values({**results, **self._rates()}),
                         f"{rate:.0f} samples/s", self._course.left(epoch, done)))  # fmt: skip

    def row(self, row: Mapping[str, float], done: int, ends_epoch: bool) -> None:
        epoch = int(row["epoch"])
        where = f"{self._course.name(epoch - 1)}: step {row['step']:.0f}"
        is_last = ends_epoch and epoch == self._course.epochs
        left = "" if is_last else self._course.left(epoch if ends_epoch else epoch - 1, done)
        self.say(_joined(where, *_values(row), left))

    def say(self, sentence: str) -> None:
        print(sentence, file=_Forgiving(sys.stderr), flush=True)


LONGEST_BAR, SHORTEST_BAR = 40, 8  # columns


class Bar(Reporter):
    """A rich progress bar: loss and metrics of the last step, samples per second, remaining time of the whole fit.

    On a narrow terminal, fields are dropped in this order: samples per second, metrics (the last one first), learning
    rate, batch count, remaining time, epoch, loss.
    """

    def __init__(self, console: Any, course: Course, rates: Rates = dict) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._course, self._rates = course, rates
        self._column = BarColumn(SHORTEST_BAR)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            self._column,
            TextColumn("{task.fields[values]}", markup=False),
            console=console,
            auto_refresh=False,
        )
        self._task: Any = None
        self._epoch = -1
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
        name, texts = self._fitting(epoch, done, total, {**results, **self._rates()})
        self._bar.update(self._task, completed=done, description=name, values=texts, refresh=True)

    def _fitting(self, epoch: int, done: int, total: int | None, values: Mapping[str, Any]) -> tuple[str, str]:
        """Return the texts before and after the progress bar, with as many fields as fit on the line."""
        name, count = self._course.name(epoch), f"{done}/{total}" if total else str(done)
        rates = [text for text in _values(values) if _is_rate(text)]
        loss, *metrics = [text for text in _values(values) if not _is_rate(text)] or [""]
        left, speed = self._course.left(epoch, done), f"{self._rate:.0f} samples/s"
        texts = [count, loss, *metrics, *rates, speed, left]
        for one in [speed, *reversed(metrics), *rates, count, left, name, loss]:
            room = self._bar.console.width - len(_joined(*texts)) - len(name) - 2  # a space on each side of the bar
            if room >= SHORTEST_BAR:
                break
            name = "" if one is name else name
            texts = [text for text in texts if text is not one]
        room = self._bar.console.width - len(_joined(*texts)) - len(name) - 2
        self._column.bar_width = max(min(room, LONGEST_BAR), 1)
        return name, _joined(*texts)

    def _begin(self, epoch: int, done: int, total: int | None) -> None:
        if not self._course.is_begun:
            self._course.begin(epoch, done, total)
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._epoch = epoch
        self._task = self._bar.add_task("", total=total, values="")

    def row(self, row: Mapping[str, float], done: int, ends_epoch: bool) -> None:
        where = "" if ends_epoch else f"step {row['step']:.0f}"
        self.say(_joined(self._course.name(int(row["epoch"]) - 1), where, *_values(row)))

    def say(self, sentence: str) -> None:
        from rich.text import Text

        self._bar.console.print(Text(sentence), soft_wrap=True)

    def close(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        self._bar.stop()


class _Forgiving:
    """A stream whose write errors are ignored."""

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


_RATE, _BRIEF = "learning_rate", "lr"


def _is_rate(text: str) -> bool:
    return text.partition(" ")[0].rpartition(".")[2] == _BRIEF


def _values(values: Mapping[str, Any]) -> list[str]:
    """Return a text such as ``lr 0.001`` for each value except ``epoch`` and ``step``."""
    named = ((f"{n.removesuffix(_RATE)}{_BRIEF}" if n.rpartition(".")[2] == _RATE else n, v) for n, v in values.items())
    return [f"{shown(name)} {float(v):.4g}" for name, v in named if name not in ("epoch", "step")]

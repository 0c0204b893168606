"""``batch_size="auto"``: the largest power-of-two batch size that fits in memory, by estimates and trial steps."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradgraph.data.arrays.batch import Feed, fixed_rows
from gradgraph.data.sources.sources import Order, Source
from gradgraph.errors import DataError, ModelError, shown
from gradgraph.machine.free_memory import free_memory
from gradgraph.runtime.execution.binding import BoundSession
from gradgraph.runtime.execution.memory import Prediction
from gradgraph.runtime.execution.part import Part
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.runtime.loop.logs import memory

log = logging.getLogger("gradgraph")

SHARE = 0.8  # share of the free memory that may be used
FIRST = 8  # samples per batch in the first trial
LEAP = 16  # maximum factor between the batch sizes of two trials, since the estimate may be too low
CAUTION = 1.5  # safety factor on the estimate until two trials can be compared
_WRITTEN = re.compile(r"auto(?::\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?)?", re.IGNORECASE)


@dataclass(frozen=True)
class BatchSize:
    """The largest batch size that fits in memory, as found by ``Trainer.find_batch_size``.

    Attributes:
        samples: the batch size.
        bytes: memory that a step with this batch size adds to the process.
        limit: the limit on ``bytes``.
        most: whether the batch size is limited by the data (fewer than twice as many samples) or by a fixed batch size
            of the model, not by memory.
    """

    samples: int
    bytes: int
    limit: int
    most: bool

    def __str__(self) -> str:
        why = "the data have no more" if self.most else "twice as many would not fit"
        return f"a batch of {self.samples} needs {self.bytes / 2**20:,.0f} MiB of {self.limit / 2**20:,.0f} MiB; {why}"


def limit_of(given: Any) -> int | None:
    """Return the limit in bytes of a batch size such as ``"auto:4GB"``, or None for ``"auto"``; raises DataError."""
    found = _WRITTEN.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is None:
        raise DataError(
            f"batch_size is '{shown(given)}'; it should be a whole number, 'auto', or 'auto:' and a memory limit "
            "('auto:4GB')"
        )
    number, unit, binary = found.groups()
    base = 1024 if binary else 1000
    return None if number is None else int(float(number) * base ** " KMGT".index((unit or " ").upper()))


def find_batch_size(session: StepSession, source: Source, limit: int | None, drop_last: bool) -> BatchSize:
    """Return the largest power-of-two batch size that fits in memory; state and progress are unchanged.

    Args:
        limit: total memory of this process in bytes; by default its current memory plus 80 % of the free memory.
        drop_last: as for ``fit``; a smaller last batch needs a separate session with its own memory.

    Raises:
        DataError: if the data are already batched, a step on one sample does not fit, or free memory is unknown.
    """
    fixed = fixed_rows(session.manifest.inputs)
    rows = source.rows
    if fixed is None and rows is None:
        raise DataError("the data are already batched, so batch_size has no effect; remove it")
    if not session.state.on_cpu:
        raise DataError("an automatic batch size is supported on the CPU only; give a number")
    allowed = _allowed(limit)
    search = _Search(session, source, allowed, drop_last)
    if fixed is not None:
        return BatchSize(fixed, search.trial(fixed), allowed, True)
    assert rows is not None
    return search(1 << (rows.bit_length() - 1))


def _allowed(limit: int | None) -> int:
    """Return the bytes that this process may use in addition to its current memory; raises DataError."""
    taken = int(memory().get("memory_mib", 0) * 2**20)
    if limit is not None:
        if limit <= taken:
            raise DataError(f"this process already uses {taken / 2**20:,.0f} MiB; give a larger memory limit")
        return limit - taken
    free = free_memory()
    if free is None:
        raise DataError("the free memory of this system is unknown; give a memory limit, such as 'auto:4GB'")
    return int(SHARE * free)


class _Search:
    def __init__(self, session: StepSession, source: Source, allowed: int, drop_last: bool) -> None:
        self._session, self._source, self._allowed, self._drop_last = session, source, allowed, drop_last
        self._taken: dict[int, int] = {}  # measured bytes by batch size
        self._held = sum(s.nbytes for s in session.manifest.state)  # bytes of the backup of the state during a trial
        session.state.read()
        gc.collect()
        self._before = memory().get("memory_mib", 0.0)

    def __call__(self, most: int) -> BatchSize:
        size = min(FIRST, most)
        while not self._fits(size):
            if size == 1:
                raise DataError(
                    f"a step on one sample needs more than the available {self._allowed / 2**20:,.0f} MiB; allow more "
                    "memory, or use a smaller model"
                )
            size //= 2
            most = size
        slope = (1 if self._drop_last else 2) * CAUTION * (self._estimate(2 * size) - self._estimate(size)) / size
        while size < most:
            room = self._allowed - self._taken[size]
            following = size
            while following < min(most, LEAP * size) and (2 * following - size) * slope <= room:
                following *= 2
            if following == size:
                break
            if not self._fits(following):
                most = following // 2
                slope *= 2
                continue
            measured = (self._taken[following] - self._taken[size]) / (following - size)
            slope, size = max(measured, slope / CAUTION), following
        return BatchSize(size, self._taken[size], self._allowed, size * 2 > (self._source.rows or 0))

    def _fits(self, size: int) -> bool:
        with contextlib.suppress(ModelError, MemoryError):  # an allocation failed
            self._taken[size] = self.trial(size)
            return self._taken[size] <= self._allowed
        return False

    def _feeds(self, size: int) -> Mapping[str, Feed]:
        source = self._session.data.source(self._source, Order(size))
        return self._session.data.checker(next(iter(source.batches(0))))

    def _estimate(self, size: int) -> int:
        feeds = self._feeds(min(size, self._source.rows or size))
        sizes = {dim: n for part in self._session.parts.values() for dim, n in part.sizes(feeds).items()}
        found = Prediction(self._session, sizes).memory
        return found.peak + found.batch

    def trial(self, size: int) -> int:
        """Return the memory in bytes that training on batches of ``size`` samples adds to the process."""
        taken = 0.0
        with self._session.undone():
            for part in self._session.parts.values():
                alive = [self._opened(part, size)]
                if rest := 0 if self._drop_last else (self._source.rows or 0) % size:
                    alive.append(self._opened(part, rest, general=True))
                taken = max(taken, memory().get("memory_mib", 0.0) - self._before)
                del alive
                gc.collect()
        return max(int(taken * 2**20) - self._held, 0)

    def _opened(self, part: Part, size: int, general: bool = False) -> BoundSession:
        """Open a training session, run two steps on batches of ``size`` samples, and return the session.

        With ``general``, it accepts batches of any size.
        """
        feeds = self._feeds(size)
        mine = {s.name: feeds[s.name] for s in part.specs}
        session = self._session.alone(part, {} if general else part.sizes(mine))
        for _ in range(2):
            session.run(mine)
        return session

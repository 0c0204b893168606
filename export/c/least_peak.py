"""Search for the order of statements with the smallest peak of live memory."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from gradgraph.export.c.c_plan import Statement, aligned
from gradgraph.export.c.program import Tensor

MOST_STATES = 2000


@dataclass(slots=True)
class _State:
    """A set of finished statements: its bits, those that can run next, the bytes alive, the peak until then, and how
    it was reached.
    """

    done: int
    ready: tuple[int, ...]
    live: int
    peak: int
    last: int = -1
    before: _State | None = None


def least_peak_order(
    statements: Sequence[Statement],
    needs: Mapping[Statement, Collection[Statement]],
    own: Set[Tensor],
    results: Set[Tensor],
) -> list[Statement] | None:
    """Return an order with the smallest peak, or None if the search visits more than ``MOST_STATES`` states.

    This is a best-first search over sets of finished statements. A statement that can run without raising the peak or
    the live memory runs at once, as no other order would gain by delaying it.

    Args:
        needs: for each statement, those that must run before it.
        own: the tensors in the arena.
        results: the tensors that stay alive to the end.
    """
    search = _Search(statements, needs, own, results)
    count = itertools.count()
    heap = [(0, 0, next(count), _State(0, search.first, 0, 0))]
    seen: set[int] = set()
    while heap and len(seen) < MOST_STATES:
        state = heapq.heappop(heap)[-1]
        if state.done in seen:
            continue
        seen.add(state.done)
        if state.done.bit_count() == len(statements):
            return [statements[i] for i in _path(state)]
        for after in search.following(state):
            heapq.heappush(heap, (after.peak, -after.done.bit_count(), next(count), after))
    return None


def _path(state: _State | None) -> list[int]:
    found = []
    while state is not None and state.before is not None:
        found.append(state.last)
        state = state.before
    return found[::-1]


@dataclass(slots=True)
class _Size:
    """A tensor that a statement reads or writes: its size, the bits of its readers, and what may share its memory.

    Attributes:
        kind: the type and the size that the output of an elementwise loop must have to take its memory.
    """

    size: int
    readers: int
    kind: tuple[str, int]
    reusable: bool


class _Search:
    def __init__(
        self,
        statements: Sequence[Statement],
        needs: Mapping[Statement, Collection[Statement]],
        own: Set[Tensor],
        results: Set[Tensor],
    ) -> None:
        bit = {s: 1 << i for i, s in enumerate(statements)}
        place = {s: i for i, s in enumerate(statements)}
        self.needs = [sum(bit[o] for o in needs[s]) for s in statements]
        self.followers: list[list[int]] = [[] for _ in statements]
        readers: dict[Tensor, int] = defaultdict(int)
        for i, s in enumerate(statements):
            for o in needs[s]:
                self.followers[place[o]].append(i)
            for t in s.reads & own:
                readers[t] |= bit[s]
        for t in results:
            readers[t] = -1  # alive to the end
        self.first = tuple(i for i, needed in enumerate(self.needs) if not needed)
        self.read = [[self._size(t, readers[t], t in s.safe) for t in s.reads & own] for s in statements]
        self.made = [[self._size(t, readers[t], False) for t in s.writes if t in own] for s in statements]

    @staticmethod
    def _size(tensor: Tensor, readers: int, reusable: bool) -> _Size:
        return _Size(aligned(tensor.nbytes), readers, (tensor.dtype, tensor.nbytes), reusable)

    def following(self, state: _State) -> Iterator[_State]:
        """Yield the states after each statement that is ready in ``state``; a single one if it costs no memory."""
        found = []
        for i in state.ready:
            after = self._after(state, i)
            if after.peak == state.peak and after.live <= state.live:
                yield after
                return
            found.append(after)
        yield from found

    def _after(self, state: _State, i: int) -> _State:
        done = state.done | 1 << i
        dying = [t for t in self.read[i] if not t.readers & ~done]
        reused = [t.kind for t in dying if t.reusable]
        live = peak = state.live
        for t in self.made[i]:
            if t.kind in reused:
                reused.remove(t.kind)
            else:
                peak += t.size
            if t.readers & ~done:
                live += t.size
        live -= sum(t.size for t in dying)
        ready = [j for j in state.ready if j != i]
        ready += [j for j in self.followers[i] if not self.needs[j] & ~done]
        return _State(done, tuple(ready), live, max(state.peak, peak), i, state)

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


@dataclass
class _State:
    """A set of finished statements: its bits, the bytes alive, the peak until then, and how it was reached."""

    done: int
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
    heap = [(0, 0, next(count), _State(0, 0, 0))]
    seen: set[int] = set()
    while heap and len(seen) < MOST_STATES:
        state = heapq.heappop(heap)[-1]
        if state.done in seen:
            continue
        seen.add(state.done)
        if state.done.bit_count() == len(statements):
            return [statements[i] for i in _path(state)]
        following = list(search.following(state))
        free = [s for s in following if s.peak == state.peak and s.live <= state.live]
        for after in free[:1] or following:
            heapq.heappush(heap, (after.peak, -after.done.bit_count(), next(count), after))
    return None


def _path(state: _State | None) -> list[int]:
    found = []
    while state is not None and state.before is not None:
        found.append(state.last)
        state = state.before
    return found[::-1]


class _Search:
    def __init__(
        self,
        statements: Sequence[Statement],
        needs: Mapping[Statement, Collection[Statement]],
        own: Set[Tensor],
        results: Set[Tensor],
    ) -> None:
        self.statements, self.own, self.results = statements, own, results
        bit = {s: 1 << i for i, s in enumerate(statements)}
        self.needs = [sum(bit[o] for o in needs[s]) for s in statements]
        self.readers: dict[Tensor, int] = defaultdict(int)
        for s in statements:
            for t in s.reads & own:
                self.readers[t] |= bit[s]

    def following(self, state: _State) -> Iterator[_State]:
        """Yield the states after each statement that is ready in ``state``."""
        for i, needed in enumerate(self.needs):
            if not state.done >> i & 1 and not needed & ~state.done:
                yield self._after(state, i)

    def _after(self, state: _State, i: int) -> _State:
        s, done = self.statements[i], state.done | 1 << i
        dying = [t for t in s.reads & self.own if t not in self.results and not self.readers[t] & ~done]
        made = [t for t in s.writes if t in self.own]
        reused = [t for t in dying if t in s.safe]
        peak = state.live
        for t in made:
            heir = next((r for r in reused if r.nbytes == t.nbytes and r.dtype == t.dtype), None)
            if heir is None:
                peak += aligned(t.nbytes)
            else:
                reused.remove(heir)
        kept = [t for t in made if t in self.results or self.readers[t] & ~done]
        live = state.live - sum(aligned(t.nbytes) for t in dying) + sum(aligned(t.nbytes) for t in kept)
        return _State(done, live, max(state.peak, peak), i, state)

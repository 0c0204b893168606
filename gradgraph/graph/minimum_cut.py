"""Minimum cuts of directed graphs, by Dinic's algorithm."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator

NEVER = 1 << 60  # the cost of an edge that must not be cut


class Network:
    """A directed graph of hashable items, whose edges have integer costs."""

    def __init__(self) -> None:
        self._room: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)

    def add(self, a: Hashable, b: Hashable, cost: int) -> None:
        """Add an edge whose ``cost`` is incurred if ``a`` is on the side of the source and ``b`` is not."""
        self._room[a][b] = min(self._room[a].get(b, 0) + cost, NEVER)
        self._room[b].setdefault(a, 0)

    def source_side(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """Return the items on the side of ``source`` in a minimum cut; of several cuts, the one with the fewest."""
        self._fill(source, sink)
        return set(self._levels(source, lambda a, b: self._room[a][b]))

    def sink_side(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """Return the items on the side of ``sink`` in a minimum cut; of several cuts, the one with the fewest."""
        self._fill(source, sink)
        return set(self._levels(sink, lambda a, b: self._room[b][a]))

    def _fill(self, source: Hashable, sink: Hashable) -> None:
        """Push as much flow as possible from ``source`` to ``sink``."""
        while sink in (levels := self._levels(source, lambda a, b: self._room[a][b])):
            edges = {item: iter(list(self._room[item])) for item in levels}
            while self._push(source, sink, levels, edges):
                pass

    def _levels(self, start: Hashable, room: Callable[[Hashable, Hashable], int]) -> dict[Hashable, int]:
        """Return the number of edges from ``start`` to each item that is reached by edges with ``room`` left."""
        levels, waiting = {start: 0}, deque([start])
        while waiting:
            item = waiting.popleft()
            for other in self._room[item]:
                if other not in levels and room(item, other):
                    levels[other] = levels[item] + 1
                    waiting.append(other)
        return levels

    def _push(
        self, source: Hashable, sink: Hashable, levels: dict[Hashable, int], edges: dict[Hashable, Iterator[Hashable]]
    ) -> bool:
        """Send flow along one path of increasing levels; return whether there is one."""
        path = [source]
        while path[-1] != sink:
            item = path[-1]
            step = next((o for o in edges[item] if self._room[item][o] and levels.get(o) == levels[item] + 1), None)
            if step is not None:
                path.append(step)
                continue
            path.pop()
            if not path:
                return False
        flow = min(self._room[a][b] for a, b in itertools.pairwise(path))
        for a, b in itertools.pairwise(path):
            self._room[a][b] -= flow
            self._room[b][a] += flow
        return True

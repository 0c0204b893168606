"""The minimum cut of a network (Ford and Fulkerson, with shortest paths first, as in Edmonds and Karp)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable

Parents = dict[Hashable, Hashable]


class Network:
    """A directed graph of hashable items, whose edges have integer costs."""

    def __init__(self) -> None:
        self._room: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)

    def add(self, a: Hashable, b: Hashable, cost: int) -> None:
        """Add an edge whose ``cost`` is incurred if ``a`` is on the side of the source and ``b`` is not."""
        self._room[a][b] = self._room[a].get(b, 0) + cost
        self._room[b].setdefault(a, 0)

    def side(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """Return the items on the side of ``source`` in a minimum cut; of several cuts, the one with the fewest items.

        Flow is pushed through one neighbour of the source after another. Once no path leads from a neighbour to the
        sink any more, the items reached from this neighbour are never visited again: a path from them to the sink would
        also have been a path from the neighbour.
        """
        kept = {source}
        for start in list(self._room[source]):
            while self._room[source][start] and start not in kept:
                parents = self._search(source, start, sink, kept)
                if sink in parents:
                    self._push(parents, source, sink)
                else:
                    kept.update(parents)
        return kept

    def _search(self, source: Hashable, start: Hashable, sink: Hashable, kept: set[Hashable]) -> Parents:
        """Return the predecessor of each item reached from ``start``, up to the sink if it can be reached."""
        parents, waiting = {start: source}, deque([start])
        while waiting and sink not in parents:
            here = waiting.popleft()
            for there, room in self._room[here].items():
                if room and there not in parents and there not in kept:
                    parents[there] = here
                    waiting.append(there)
        return parents

    def _push(self, parents: Parents, source: Hashable, sink: Hashable) -> None:
        """Push as much flow as possible along the path that ends in the sink."""
        path, there = [], sink
        while there != source:
            path.append((parents[there], there))
            there = parents[there]
        flow = min(self._room[a][b] for a, b in path)
        for a, b in path:
            self._room[a][b] -= flow
            self._room[b][a] += flow

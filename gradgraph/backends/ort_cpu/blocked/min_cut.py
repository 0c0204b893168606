"""The minimum cut of a network (Ford and Fulkerson; shortest paths first, as in Edmonds and Karp)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable

Parents = dict[Hashable, Hashable]


class Network:
    """Edges with integer costs between hashable items."""

    def __init__(self) -> None:
        self._room: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)

    def add(self, a: Hashable, b: Hashable, cost: int) -> None:
        """Add an edge whose ``cost`` is due if ``a`` is on the side of the source and ``b`` is not."""
        self._room[a][b] = self._room[a].get(b, 0) + cost
        self._room[b].setdefault(a, 0)

    def side(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """The nodes on the side of ``source`` in a minimum cut; of several such cuts, the one with the fewest.

        Flow is pushed through one neighbour of the source after the other. Once a neighbour is saturated, the nodes
        reached from it are never visited again: a path from there to the sink would have been a path of that neighbour,
        too.
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
        """The predecessor of each item reached, up to the sink if possible."""
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

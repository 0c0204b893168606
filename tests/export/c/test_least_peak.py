"""The search for the order with the smallest peak, beside all orders of small random graphs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from gradgraph.export.c import least_peak
from gradgraph.export.c.c_plan import Statement, aligned
from gradgraph.export.c.grouping import Group
from gradgraph.export.c.least_peak import least_peak_order
from gradgraph.export.c.program import Tensor


class Graph:
    """Random statements: each writes one or two tensors and reads some that earlier ones wrote."""

    def __init__(self, seed: int, count: int = 7) -> None:
        rng = random.Random(seed)
        self.statements: list[Statement] = []
        self.needs: dict[Statement, set[Statement]] = {}
        self.own: set[Tensor] = set()
        makers: dict[Tensor, Statement] = {}
        for i in range(count):
            reads = set(rng.sample(sorted(self.own, key=lambda t: t.name), rng.randint(0, min(3, len(self.own)))))
            safe = {t for t in reads if rng.random() < 0.5}
            sizes = [rng.choice((1, 2, 2, 4, 6)) for _ in range(rng.choice((1, 1, 1, 2)))]
            writes = [Tensor((2 * n,), rng.choice(("float32", "int32")), f"{i}.{k}") for k, n in enumerate(sizes)]
            statement = Statement(Group(), reads, writes, safe)
            self.needs[statement] = {makers[t] for t in reads}
            makers.update(dict.fromkeys(writes, statement))
            self.own.update(writes)
            self.statements.append(statement)
        elsewhere = {t for t in self.own if rng.random() < 0.1}
        self.own -= elsewhere
        self.results = {t for t in self.own if rng.random() < 0.2}

    def is_order(self, order: Sequence[Statement]) -> bool:
        return all(self.needs[s] <= set(order[:i]) for i, s in enumerate(order))

    def peak(self, order: Sequence[Statement]) -> int:
        alive: set[Tensor] = set()
        highest = 0
        for i, s in enumerate(order):
            later = {t for other in order[i + 1 :] for t in other.reads} | self.results
            ending = {t for t in s.reads & self.own if t not in later}
            free = [(t.dtype, t.nbytes) for t in ending & s.safe]
            total = sum(aligned(t.nbytes) for t in alive)
            for t in self.own.intersection(s.writes):
                if (t.dtype, t.nbytes) in free:
                    free.remove((t.dtype, t.nbytes))
                else:
                    total += aligned(t.nbytes)
            highest = max(highest, total)
            alive = (alive - ending) | {t for t in self.own.intersection(s.writes) if t in later}
        return highest


@pytest.mark.parametrize("seed", range(40))
def test_no_order_has_a_smaller_peak(seed: int) -> None:
    graph = Graph(seed)
    found = least_peak_order(graph.statements, graph.needs, graph.own, graph.results)
    assert found is not None and len(found) == len(graph.statements) and graph.is_order(found)
    orders = filter(graph.is_order, itertools.permutations(graph.statements))
    assert graph.peak(found) == min(map(graph.peak, orders))


def test_a_search_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph(0, 12)
    monkeypatch.setattr(least_peak, "MOST_STATES", 3)
    assert least_peak_order(graph.statements, graph.needs, graph.own, graph.results) is None

"""Minimum cuts against all cuts of small graphs."""

from __future__ import annotations

import itertools

import numpy as np

from gradgraph.graph.minimum_cut import Network

Edges = dict[tuple[str, str], int]


def test_cuts_are_the_cheapest_and_the_smallest() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        inner = [f"n{i}" for i in range(5)]
        edges = {pair: int(rng.integers(0, 9)) for pair in itertools.permutations(["s", *inner, "t"], 2)
                 if rng.random() < 0.5}  # fmt: skip

        def network(edges: Edges = edges) -> Network:
            found = Network()
            for (a, b), cost in edges.items():
                found.add(a, b, cost)
            return found

        def price(side: frozenset[str], edges: Edges = edges) -> int:
            return sum(c for (a, b), c in edges.items() if a in side and b not in side)

        subsets = itertools.chain.from_iterable(itertools.combinations(inner, k) for k in range(6))
        sides = [frozenset({"s", *chosen}) for chosen in subsets]
        assert network().source_side("s", "t") == min(sides, key=lambda side: (price(side), len(side)))
        largest = min(sides, key=lambda side: (price(side), -len(side)))
        assert network().sink_side("s", "t") == {*inner, "s", "t"} - largest

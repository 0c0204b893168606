"""The model of onnxruntime's arena: pieces are reused, split and joined, and never lie over each other."""

from __future__ import annotations

import itertools
import random

import pytest

from gradgraph.runtime.execution.arena import MOST_LEFT, UNIT, Arena, Piece

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ([1], UNIT),
        ([300, 300], 4 * UNIT),
        ([5 * MIB], 5 * MIB),  # in a region of 8 MiB, of which the rest is not written
        ([5 * MIB, 2 * MIB], 7 * MIB),  # a piece of less than twice the size is given whole, so this is another region
        ([600 * 1024, 600 * 1024], 1200 * 1024),
        ([MOST_LEFT * 8 - 256 * MIB, 256], MOST_LEFT * 8 - 256 * MIB + 256),
    ],
)
def test_what_is_taken(sizes: list[int], taken: int) -> None:
    arena = Arena()
    for size in sizes:
        arena.take(size)
    assert arena.taken - arena.tables == taken


def test_what_is_given_back_serves_again() -> None:
    arena = Arena()
    first, second = arena.take(MIB // 4), arena.take(MIB // 4)
    arena.give(first)
    arena.give(second)
    whole = arena.take(MIB)  # the two and the rest of the region have become one
    assert (whole.region, whole.start, whole.size) == (0, 0, MIB)
    assert (arena.taken, arena.tables) == (MIB + MIB // 32, MIB // 32)  # as in bfc_arena.h: 8 bytes for 256


def test_pieces_never_lie_over_each_other() -> None:
    rng, arena, held = random.Random(0), Arena(), list[Piece]()
    for _ in range(3000):
        if held and rng.random() < 0.48:
            arena.give(held.pop(rng.randrange(len(held))))
        else:
            size = int(2 ** rng.uniform(4, 23))
            held.append(arena.take(size))
            assert held[-1].size >= size
    spans = sorted((p.region, p.start, p.start + p.size) for p in held)
    assert all(a[0] < b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))
    assert arena.taken >= sum(p.size for p in held)

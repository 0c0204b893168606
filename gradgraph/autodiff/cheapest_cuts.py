"""Choose where recomputation cuts the forward pass into segments, to minimise memory.

Each segment should save at most a fixed number of bytes for the backward pass, and few bytes should cross cuts. For
one such limit, dynamic programming finds the cheapest cuts in one pass. Several limits are tried, and a simulation of
lifetimes chooses the best. All of it is linear in the number of nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.autodiff.recompute import Differentiated, Segments
from gradgraph.graph.lifetimes import bytes_alive

Bytes = Callable[[ir.Value], int]

_LIMITS = 12  # the number of limits tried for the bytes of a segment
_ALONE = 8  # cost factor of a value with one reader: runtimes fuse the two nodes, unless a copy reads the value as well
_NEAR = 1.02  # peaks within this factor of the minimum are considered equal; among them, the least recomputation wins


def _begin(cuts: Sequence[int]) -> float:
    """Return a sort key for cuts, which is larger if less is recomputed before the last cut."""
    return -cuts[-1] if cuts else 1


class Course:
    """A model of the peak memory of a training step for given cuts.

    Args:
        passes: a forward pass, which is cut, and its backward pass.
        size: returns the bytes of a value.
    """

    def __init__(self, passes: Differentiated, size: Bytes) -> None:
        self.passes, self.size = passes, size
        p, count = passes, len(passes.forward)
        self.saved = np.zeros(count, np.int64)
        self.crossing = np.zeros(count + 1, np.int64)
        last = {x: i for i, read in enumerate(p.reads) for x in read}
        for i, node in enumerate(p.forward):
            for y in node.outputs:
                if y not in p.moving:
                    continue
                if y in p.read:
                    self.saved[i] += size(y)
                if last.get(y, i) > i:  # crosses each cut from i + 1 to its last reader
                    price = size(y) * (_ALONE if len(y.uses()) == 1 else 1)
                    self.crossing[i + 1] += price
                    self.crossing[last[y] + 1] -= price
        self.crossing = np.cumsum(self.crossing)
        self._last = last

    def cheapest(self) -> list[int]:
        """Return the cuts with the least recomputation among cuts whose peak memory is within 2% of the minimum."""
        peaks = self._tried()
        least = min(peaks.values())
        return self._shorter(max((c for c in peaks if peaks[c] <= least * _NEAR), key=_begin), int(least * _NEAR))

    def least_recomputation(self, bytes_: int) -> tuple[int, list[int] | None]:
        """Return the minimum peak in bytes, and the cuts with the least recomputation whose peak is at most ``bytes_``.

        The cuts are None if no peak is small enough.
        """
        peaks = self._tried()
        good = [cuts for cuts, peak in peaks.items() if peak <= bytes_]
        return min(peaks.values()), self._shorter(max(good, key=_begin), bytes_) if good else None

    def _tried(self) -> dict[tuple[int, ...], int]:
        """Return the peak memory of each choice of cuts that is tried, from no cut to many."""
        total = int(self.saved.sum())
        found = {(): None} | {tuple(self.within(int(total / step))): None for step in np.geomspace(1.5, 150, _LIMITS)}
        return {cuts: self.peak(cuts) for cuts in found}

    def _shorter(self, cuts: Sequence[int], bytes_: int) -> list[int]:
        """Drop cuts from the end as long as the peak stays within ``bytes_``; return the remaining cuts."""
        cuts = list(cuts)
        while cuts and self.peak(cuts[:-1]) <= bytes_:
            del cuts[-1]
        return cuts

    def within(self, limit: int) -> list[int]:
        """Return the cuts with the fewest bytes alive across them, where each segment saves at most ``limit`` bytes.

        A segment exceeds the limit only if a single node does.
        """
        count = len(self.saved)
        held = np.concatenate([[0], np.cumsum(self.saved)])
        cost = np.zeros(count + 1)
        before = np.zeros(count + 1, np.int64)
        window: deque[int] = deque([0])
        for i in range(1, count + 1):
            while len(window) > 1 and held[i] - held[window[0]] > limit:
                window.popleft()
            before[i] = window[0]
            cost[i] = cost[window[0]] + (self.crossing[i] if i < count else 0)
            while window and cost[window[-1]] >= cost[i]:
                window.pop()
            window.append(i)
        cuts = []
        i = int(before[count])
        while i > 0:
            cuts.append(i)
            i = int(before[i])
        return cuts[::-1]

    def peak(self, cuts: Sequence[int]) -> int:
        """Return the peak memory with these cuts in bytes: of all values and gradients alive at one time."""
        lives = [(first, last, self.size(y)) for y, first, last in self._lives(cuts)]
        return max(bytes_alive(lives, len(self.passes.forward) + len(self.passes.backward) + 1))

    def _lives(self, cuts: Sequence[int]) -> Iterator[tuple[ir.Value, int, int]]:
        """Yield each value of a step with these cuts, and the places of the first and the last node at which it lives.

        A value that is recomputed has two lives.
        """
        p, segments = self.passes, Segments(self.passes, cuts)
        count = len(p.forward)
        needed_at = [count + p.begin(cut) for cut in cuts]  # when each segment is recomputed
        for i, node in enumerate(p.forward):
            segment = segments.of(i)
            for y in node.outputs:
                last = self._last.get(y, i)
                readers = p.read.get(y, ())
                if y in p.moving and y not in segments.kept and segment < len(cuts):
                    yield y, i, last
                    if readers:
                        yield y, min(needed_at[segment], count + readers[0]), count + readers[-1]
                    continue
                if readers:
                    last = max(last, count + readers[-1])
                if y in segments.kept and segment < len(cuts):
                    last = max(last, needed_at[segment])
                yield y, i, last
        found = {x: i for i in p.needed for x in p.backward[i].inputs if x is not None}
        for i in p.needed:
            for y in p.backward[i].outputs:
                yield y, count + i, count + found.get(y, i)

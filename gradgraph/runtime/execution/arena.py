"""A simulation of onnxruntime's CPU arena (``BFCArena``) to estimate its memory for temporary tensors.

It follows ``onnxruntime/core/framework/bfc_arena.cc``, with default settings or settings from ``regions``. Memory is
allocated from the system in regions, each twice as large as the last one, and never freed. A tensor gets the smallest
free piece in its size class that is large enough, or else in the next larger classes. Adjacent free pieces are merged.
Only pages that were written count as used memory.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from gradgraph.runtime.execution.regions import MOST_LEFT, UNIT, USUAL

HANDLE = 8  # bytes per unit of a region in the region's table, which is written at allocation
LARGEST = 1 << 30  # limit on doubling the region size, in bytes; a single larger tensor exceeds it
CLASSES = 21  # size classes: 256 bytes, 512, and so on


@dataclass(eq=False)
class Piece:
    """A contiguous piece of a memory region, either free or allocated to one tensor.

    Attributes:
        start, size: position and size in bytes.
        before, after: the neighbouring pieces in the same region.
    """

    region: int
    start: int
    size: int
    before: Piece | None = None
    after: Piece | None = None
    free: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key of free pieces: by size, then by address."""
        return self.size, self.region, self.start


class Arena:
    """A simulated allocator.

    Args:
        first: size of the first region in bytes.
        most_left: a free piece is split if at least this many bytes, or half of the piece, would remain unused.

    Attributes:
        used: for each region, the bytes up to the end of the last piece ever in use.
        tables: bytes of the tables of all regions.
    """

    def __init__(self, first: int = USUAL, most_left: int = MOST_LEFT) -> None:
        self.used: list[int] = []
        self.tables = 0
        self._next, self._most_left = first, most_left
        self._free: list[list[Piece]] = [[] for _ in range(CLASSES)]

    @property
    def taken(self) -> int:
        """The total memory of the allocator in bytes: all bytes ever allocated to tensors, and the tables."""
        return sum(self.used) + self.tables

    def take(self, size: int) -> Piece:
        """Allocate a tensor of ``size`` bytes."""
        size = max(1, -(-size // UNIT)) * UNIT
        piece = self._found(size) or self._new_region(size)
        if piece.size >= 2 * size or piece.size - size >= self._most_left:
            rest = Piece(piece.region, piece.start + size, piece.size - size, piece, piece.after)
            if piece.after is not None:
                piece.after.before = rest
            piece.size, piece.after = size, rest
            self._add(rest)
        self.used[piece.region] = max(self.used[piece.region], piece.start + size)
        return piece

    def give(self, piece: Piece) -> None:
        """Free a piece and merge it with free neighbours."""
        after = piece.after
        if after is not None and after.free:
            self._remove(after)
            self._join(piece, after)
        before = piece.before
        if before is not None and before.free:
            self._remove(before)
            self._join(before, piece)
            piece = before
        self._add(piece)

    def _found(self, size: int) -> Piece | None:
        for pieces in self._free[_class_of(size) :]:
            place = bisect.bisect_left(pieces, (size, -1, -1), key=lambda piece: piece.order)
            if place < len(pieces):
                piece = pieces.pop(place)
                piece.free = False
                return piece
        return None

    def _new_region(self, size: int) -> Piece:
        grown = False
        while size > self._next:
            self._next, grown = 2 * self._next, True
        whole = self._next
        if not grown:
            self._next = min(2 * self._next, LARGEST)
        self.used.append(0)
        self.tables += whole // UNIT * HANDLE
        return Piece(len(self.used) - 1, 0, whole)

    def _add(self, piece: Piece) -> None:
        piece.free = True
        bisect.insort(self._free[_class_of(piece.size)], piece, key=lambda piece: piece.order)

    def _remove(self, piece: Piece) -> None:
        pieces = self._free[_class_of(piece.size)]
        del pieces[bisect.bisect_left(pieces, piece.order, key=lambda piece: piece.order)]
        piece.free = False

    @staticmethod
    def _join(first: Piece, second: Piece) -> None:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first


def _class_of(size: int) -> int:
    return min(CLASSES - 1, (size // UNIT).bit_length() - 1)

"""A model of onnxruntime's arena: how much memory it takes for tensors that come and go.

It follows ``BFCArena`` on the CPU (``onnxruntime/core/framework/bfc_arena.cc``), with its defaults or as ``regions``
has it. Memory is taken from the system in regions, each twice as large as the last one, and never given back. A
tensor gets the smallest free piece of its class of sizes, and of the next classes if there is none. Neighbours that
are free become one piece. The system counts a page once it is written, so a region takes what was ever used of it.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from gradgraph.runtime.execution.regions import MOST_LEFT, UNIT, USUAL

HANDLE = 8  # bytes that a region's table has for each unit of it, written at once
LARGEST = 1 << 30  # bytes of a region behind the first one that is not asked for at once
CLASSES = 21  # of sizes: of 256 bytes, of 512, and so on


@dataclass(eq=False)
class Piece:
    """A part of a region; ``order`` is its address, ``region`` where what was used of it is counted."""

    region: int
    start: int
    size: int
    before: Piece | None = None
    after: Piece | None = None
    free: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        return self.size, self.region, self.start


class Arena:
    """Takes pieces and gives them back.

    Args:
        first: bytes of the first region.
        most_left: bytes that may stay unused at the end of a piece, below its half.

    Attributes:
        used: of each region, the bytes up to the last one that was ever part of a piece in use.
        tables: bytes of the tables of all regions.
    """

    def __init__(self, first: int = USUAL, most_left: int = MOST_LEFT) -> None:
        self.used: list[int] = []
        self.tables = 0
        self._next, self._most_left = first, most_left
        self._free: list[list[Piece]] = [[] for _ in range(CLASSES)]

    @property
    def taken(self) -> int:
        """Bytes that were written at any time."""
        return sum(self.used) + self.tables

    def take(self, size: int) -> Piece:
        """Memory for a tensor of so many bytes."""
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
        """Give a piece back; it is joined with neighbours that are free."""
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

"""A digest that detects damaged files: CRC-32 of every MiB, and SHA-256 over the CRC-32 values.

Computing it takes a quarter of a second per GB on any processor, and several threads can share the work; SHA-256 of all
bytes would take two seconds without hardware support. The digest detects damage, but does not authenticate the file.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable

from gradgraph.machine.threads import workers

BLOCK = 1 << 20
_PART = 16 * BLOCK  # bytes for which one task of a thread computes the CRC-32 values


class Digest:
    """The digest of a stream of bytes, independent of the sizes of the pieces in which it arrives."""

    def __init__(self) -> None:
        self._blocks = hashlib.sha256()
        self._crc, self._filled = 0, 0

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            part = view[: BLOCK - self._filled]
            self._crc, self._filled = zlib.crc32(part, self._crc), self._filled + len(part)
            if self._filled == BLOCK:
                self._end_block()
            view = view[len(part) :]

    def update_text(self, text: str) -> None:
        """Add ``text`` and its length, so that different lists of texts are different streams."""
        encoded = text.encode()
        self.update(b"%d:" % len(encoded))
        self.update(encoded)

    def text(self) -> str:
        """Return the final digest; nothing can be added afterwards."""
        self._end_block()
        return _text(self._blocks)

    def _end_block(self) -> None:
        self._blocks.update(_entry(self._filled, self._crc))
        self._crc, self._filled = 0, 0


def digest_of(parts: Iterable[bytes | memoryview]) -> str:
    """Return the digest of the concatenated ``parts``."""
    digest = Digest()
    for part in parts:
        digest.update(part)
    return digest.text()


def digest_in_threads(read: Callable[[int, int], bytes | memoryview], size: int) -> str:
    """Return the digest of ``size`` bytes that threads read.

    Args:
        read: a function that returns the bytes at an offset, given the offset and a length of at most a MiB.
        size: the number of bytes.
    """

    def entries(start: int) -> bytes:
        end = min(start + _PART, size)
        blocks = (read(at, min(BLOCK, end - at)) for at in range(start, end, BLOCK))
        return b"".join(_entry(len(block), zlib.crc32(block)) for block in blocks)

    digest = hashlib.sha256()
    with workers() as pool:
        for found in pool.map(entries, range(0, size, _PART)):
            digest.update(found)
    if size % BLOCK == 0:  # the last block, which is never full
        digest.update(_entry(0, 0))
    return _text(digest)


def _entry(size: int, crc: int) -> bytes:
    """Return what the digest hashes for a block of ``size`` bytes."""
    return b"%d:%d;" % (size, crc)


def _text(blocks: hashlib._Hash) -> str:
    return f"crc32-sha256:{blocks.hexdigest()}"

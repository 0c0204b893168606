"""Members of a tar file, located from its headers.

Nothing is unpacked, and no member name is used as a path. Names and sizes are validated before content is read. The
file size limits the number of headers, which take 512 bytes each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gradgraph.errors import DataError, shown
from gradgraph.files.untrusted.regular import open_regular, readable

BLOCK = 512
MOST_NAME = 1 << 16  # maximum bytes of a header with a long name
SKIPPED = b"5g"  # member types that are skipped: folders, and headers for all members
LONG_NAME, EXTENDED, FILES = b"L", b"x", (b"0", b"\0", b"7")


class Member(NamedTuple):
    """A member of a tar archive: ``size`` bytes at ``offset``."""

    name: str
    offset: int
    size: int


def members(path: Path) -> Iterator[Member]:
    """Yield the files in a tar file (ustar, GNU or pax; not compressed), in order; raises DataError."""
    with readable(path, "path"), open_regular(path) as file:
        yield from _members(file, path)


def name_at(path: Path, offset: int) -> str:
    """Return the name of the member whose content begins at ``offset``, truncated as in its header."""
    with open_regular(path) as file:
        file.seek(offset - BLOCK)
        return _short_name(file.read(BLOCK))


def _members(file: BinaryIO, path: Path) -> Iterator[Member]:
    end = os.fstat(file.fileno()).st_size
    long: dict[bytes, bytes] = {}  # attributes of the next member from an extended header
    position = 0
    while position + BLOCK <= end:
        file.seek(position)
        head = file.read(BLOCK)
        if not head.strip(b"\0"):
            if file.read(MOST_NAME).strip(b"\0"):
                raise _damaged(path, "there are data after its end, such as a second tar file")
            return
        _check_header(head, position, path)
        size, kind = _octal(head[124:136], path), head[156:157]
        if kind in FILES and b"size" in long:
            if not re.fullmatch(rb"[0-9]{1,19}", long[b"size"]):
                raise _damaged(path, "a size is not a number")
            size = int(long[b"size"])
        start = position + BLOCK
        if start + size > end:
            raise _damaged(path, "it ends within a member")
        position = start + -(-size // BLOCK) * BLOCK
        if kind in (LONG_NAME, EXTENDED):
            if size > MOST_NAME:
                raise _damaged(path, f"a header has {size:,} bytes")
            content = file.read(size)
            long |= {b"path": content.rstrip(b"\0")} if kind == LONG_NAME else dict(_records(content, path))
        elif kind in FILES:
            name = long[b"path"].decode("utf-8", "replace") if b"path" in long else _short_name(head)
            yield Member(name, start, size)
            long = {}
        elif kind not in SKIPPED:
            raise DataError(
                f"'{shown(path)}' contains '{shown(_short_name(head))}', which is a link or a device; write it again "
                "with regular files only"
            )
        else:
            long = {}
    raise _damaged(path, "its end is missing")


def _check_header(head: bytes, position: int, path: Path) -> None:
    if position == 0 and head[:3] == b"\x1f\x8b\x08":
        raise DataError(f"'{shown(path)}' is compressed, but samples are read in place; unpack it to a plain .tar")
    checksum = re.match(rb" *([0-7]{1,7})[ \0]", head[148:156])
    if checksum is None or int(checksum[1], 8) != sum(head[:148]) + 8 * 32 + sum(head[156:]):
        raise _damaged(path, "a header is missing or damaged")


def _octal(field: bytes, path: Path) -> int:
    """Return the number in a header field: octal digits, or a binary number after a first byte of 0x80."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not re.fullmatch(rb"[0-7]*", digits):
        raise _damaged(path, "a size is not a number")
    return int(digits or b"0", 8)


def _records(content: bytes, path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield pairs (key, value) of an extended header, with lines such as ``26 path=…`` (length, key and value)."""
    while content:
        found = re.match(rb"([0-9]{1,6}) ([^=]+)=", content)
        length = int(found[1]) if found else 0
        if found is None or not found.end() < length <= len(content):
            raise _damaged(path, "an extended header is damaged")
        yield found[2], content[found.end() : length - 1]
        content = content[length:]


def _short_name(head: bytes) -> str:
    name, prefix = head[:100].split(b"\0")[0], head[345:500].split(b"\0")[0]
    whole = prefix + b"/" + name if prefix and head[257:262] == b"ustar" and head[263:265] == b"00" else name
    return whole.decode("utf-8", "replace")


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"'{shown(path)}' is not a complete tar file ({what}); write it again")

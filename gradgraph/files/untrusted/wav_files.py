"""A reader of untrusted WAV files, which returns samples as floats and reads them on demand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gradgraph.files.untrusted.regular import UnreadableError, open_regular

Array = np.ndarray[Any, Any]

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
FORMATS = {6: "A-law", 7: "µ-law", 2: "ADPCM", 17: "ADPCM", 85: "MP3"}
STREAMED = 0xFFFFFFFF  # the size of a chunk whose writer did not know it
MOST_CHUNKS, MOST_CHANNELS, MOST_RATE = 1000, 64, 768_000


@dataclass(frozen=True)
class WavFile:
    """The header of a WAV file.

    Attributes:
        path: the path of the file.
        rate: samples per second.
        channels: the number of interleaved channels.
        frames: the number of samples per channel.
        kind, bits: the sample format, PCM or FLOAT, and the bits per number.
        start: the offset of the samples in the file.
    """

    path: Path
    rate: int
    channels: int
    frames: int
    kind: int
    bits: int
    start: int

    def read(self, first: int = 0, count: int | None = None) -> Array:
        """Return ``count`` samples per channel, starting at ``first``, or all, as float32 [channels, count].

        Integers are scaled to ±1.

        Raises:
            UnreadableError: if the file was truncated, or contains nonfinite numbers.
        """
        count = self.frames - first if count is None else count
        width = self.bits // 8
        with open_regular(self.path) as file:
            file.seek(self.start + first * self.channels * width)
            content = file.read(count * self.channels * width)
        if len(content) < count * self.channels * width:
            raise UnreadableError("it ends before the last sample that its header declares")
        samples = _floats(content, self.kind, width).reshape(-1, self.channels).T
        if self.kind == FLOAT and not np.isfinite(samples).all():
            raise UnreadableError("it contains numbers that are not finite")
        return np.ascontiguousarray(samples)


def _floats(content: bytes, kind: int, width: int) -> Array:
    """Return samples of ``width`` bytes as float32; integers are scaled to ±1. ``kind`` is PCM or FLOAT."""
    if kind == FLOAT:
        with np.errstate(over="ignore"):  # values beyond float32 become infinite, and are rejected
            return np.frombuffer(content, f"<f{width}").astype(np.float32)
    if width == 1:  # the only unsigned format
        return (np.frombuffer(content, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:
        whole = np.zeros((len(content) // 3, 4), np.uint8)
        whole[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        return (whole.view("<i4")[:, 0] / np.float64(1 << 31)).astype(np.float32)
    return (np.frombuffer(content, f"<i{width}") / np.float64(1 << 8 * width - 1)).astype(np.float32)


def wav_file(path: str | os.PathLike[str]) -> WavFile:
    """Read the header of a WAV file.

    Raises:
        UnreadableError: if ``path`` is not a regular file or not WAV, is damaged, or has samples in a format other than
            PCM of 8, 16, 24 or 32 bits, or float of 32 or 64.
    """
    with open_regular(path) as file:
        head = file.read(12)
        if head[:4] != b"RIFF" or head[8:] != b"WAVE":
            raise UnreadableError("it is not a WAV file")
        end = file.seek(0, os.SEEK_END)
        file.seek(12)
        return _header(Path(path), file, end)


def _header(path: Path, file: BinaryIO, end: int) -> WavFile:
    known: tuple[int, int, int, int] | None = None
    for _ in range(MOST_CHUNKS):
        head = file.read(8)
        if len(head) < 8:
            break
        name, size, start = head[:4], int.from_bytes(head[4:], "little"), file.tell()
        if name == b"data":
            if known is None:
                raise UnreadableError("its samples come before their format")
            size = end - start if size == STREAMED else size
            if start + size > end:
                raise UnreadableError("it ends before the last sample that its header declares")
            kind, channels, rate, bits = known
            return WavFile(path, rate, channels, size // (channels * (bits // 8)), kind, bits, start)
        if name == b"fmt ":
            known = _format(file.read(min(size, 40)))
        file.seek(start + size + size % 2)
    raise UnreadableError("it has no samples")


def _format(chunk: bytes) -> tuple[int, int, int, int]:
    """Return (sample format, channels, rate, bits per number) from the content of the chunk ``fmt``."""
    if len(chunk) < 16:
        raise UnreadableError("its format is too short")
    kind, channels = (int.from_bytes(chunk[i : i + 2], "little") for i in (0, 2))
    rate, align, bits = (int.from_bytes(chunk[i:j], "little") for i, j in ((4, 8), (12, 14), (14, 16)))
    if kind == EXTENSIBLE and len(chunk) >= 26:
        kind = int.from_bytes(chunk[24:26], "little")
    if bits not in {PCM: (8, 16, 24, 32), FLOAT: (32, 64)}.get(kind, ()):
        what = FORMATS.get(kind, f"numbers of {bits} bits in format {kind}")
        raise UnreadableError(f"its samples are {what}; only PCM and float are supported")
    if not 0 < channels <= MOST_CHANNELS or not 0 < rate <= MOST_RATE or align != channels * bits // 8:
        raise UnreadableError(f"its format declares {channels} channels, {rate:,} samples/s and {align} bytes each")
    return kind, channels, rate, bits

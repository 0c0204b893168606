"""WAV files for tests, written by hand."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np


def chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    return name + struct.pack("<I", len(content) if size is None else size) + content + b"\0" * (len(content) % 2)


def format_chunk(kind: int = 1, channels: int = 1, rate: int = 8000, bits: int = 16, further: bytes = b"") -> bytes:
    align = channels * bits // 8
    return chunk(
        b"fmt ",
        struct.pack("<HHIIHH", kind, channels, rate, rate * align % (1 << 32), align % (1 << 16), bits) + further,
    )


def riff(*chunks: bytes) -> bytes:
    content = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(content)) + content


def write_wav(path: Path, samples: np.ndarray, rate: int = 8000) -> Path:
    """Write float samples, [count] or [channels, count], as a WAV file with 16-bit PCM."""
    each = np.atleast_2d(samples)
    content = np.round(each.T * 32767).astype("<i2").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(riff(format_chunk(channels=len(each), rate=rate), chunk(b"data", content)))
    return path


def sounds(root: Path, counts: int, seed: int = 0, rate: int = 8000) -> Path:
    """Write tones, chirps and noises of 0.5 to 1.5 seconds, in a folder for each class."""
    rng = np.random.default_rng(seed)
    for kind in ("chirp", "noise", "tone"):
        for i in range(counts):
            t = np.arange(int(rate * rng.uniform(0.5, 1.5))) / rate
            pitch = rng.uniform(300, 1500)
            made = {
                "tone": np.sin(2 * np.pi * pitch * t),
                "chirp": np.sin(2 * np.pi * (pitch * t + 600 * t * t)),
                "noise": rng.normal(size=len(t)) / 2,
            }[kind]
            loud = made * rng.uniform(0.2, 0.8) + rng.normal(size=len(t)) / 100
            write_wav(root / kind / f"{i}.wav", loud.clip(-1, 1), rate)
    return root

"""WAV files are read as their format says, and what is none is said in one sentence."""

from __future__ import annotations

import os
import struct
import wave
from pathlib import Path

import numpy as np
import pytest

from gradgraph.files.untrusted.regular import UnreadableError
from gradgraph.files.untrusted.wav_files import wav_file
from tests.kit.wav_writing import chunk, format_chunk, riff

WIDTHS = {1: "u1", 2: "<i2", 3: None, 4: "<i4"}


@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("width", WIDTHS)
def test_pcm_is_what_pythons_own_module_writes(width: int, channels: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(width)
    most = 1 << 8 * width - 1
    whole = rng.integers(-most, most, (17, channels))
    whole[0], whole[1], whole[2] = -most, most - 1, 0
    if width == 3:
        content = whole.astype("<i4").view(np.uint8).reshape(17, channels, 4)[..., :3].tobytes()
    else:
        content = (whole + (128 if width == 1 else 0)).astype(WIDTHS[width]).tobytes()
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(44_100)
        file.writeframes(content)
    found = wav_file(tmp_path / "a.wav")
    assert (found.rate, found.channels, found.frames, found.bits) == (44_100, channels, 17, 8 * width)
    samples = found.read()
    assert samples.dtype == np.float32 and samples.shape == (channels, 17)
    assert np.array_equal(samples, (whole.T / most).astype(np.float32))
    assert np.array_equal(found.read(3, 5), samples[:, 3:8])


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("extensible", [False, True])
def test_floats(bits: int, extensible: bool, tmp_path: Path) -> None:
    samples = np.random.default_rng(0).normal(size=(9, 2)).astype(f"<f{bits // 8}")
    further = struct.pack("<HHIH", 22, bits, 3, 3) + b"\0" * 14 if extensible else b""
    kind = 0xFFFE if extensible else 3
    odd = chunk(b"LIST", b"abc")  # of an odd size, with a byte behind it that belongs to none
    data = chunk(b"data", samples.tobytes())
    (tmp_path / "a.wav").write_bytes(riff(odd, format_chunk(kind, 2, 16_000, bits, further), odd, data))
    assert np.array_equal(wav_file(tmp_path / "a.wav").read(), samples.T.astype(np.float32))


def test_a_writer_that_did_not_know_the_size(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(riff(format_chunk(), chunk(b"data", b"\0\1" * 10, size=0xFFFFFFFF)))
    assert wav_file(tmp_path / "a.wav").frames == 10


DATA = chunk(b"data", b"\0\0" * 8)
HOSTILE = {
    "empty": b"",
    "a picture": b"\x89PNG\r\n\x1a\n" + b"\0" * 40,
    "big-endian": b"RIFX" + riff(format_chunk(), DATA)[4:],
    "cut": riff(format_chunk(), DATA)[:-3],
    "too long": riff(format_chunk(), chunk(b"data", b"\0\0", size=1 << 31)),
    "no samples": riff(format_chunk()),
    "no format": riff(DATA),
    "a short format": riff(chunk(b"fmt ", b"\1\0\1\0"), DATA),
    "no channels": riff(format_chunk(channels=0), DATA),
    "many channels": riff(format_chunk(channels=60_000), DATA),
    "no rate": riff(format_chunk(rate=0), DATA),
    "12 bits": riff(format_chunk(bits=12), DATA),
    "half floats": riff(format_chunk(kind=3, bits=16), DATA),
    "A-law": riff(format_chunk(kind=6, bits=8), DATA),
    "MP3": riff(format_chunk(kind=85), DATA),
    "endless chunks": riff(*[chunk(b"junk", b"")] * 2000, format_chunk(), DATA),
    "a chunk of 4 GB": riff(chunk(b"junk", b"", size=0xFFFFFFFE), format_chunk(), DATA),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_sound_is_one_sentence(what: str, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(HOSTILE[what])
    with pytest.raises(UnreadableError, match=r"\w+") as caught:
        wav_file(tmp_path / "a.wav")
    assert "\n" not in str(caught.value)


def test_numbers_that_are_not_finite_and_pipes(tmp_path: Path) -> None:
    content = np.array([0, np.nan], "<f4").tobytes()
    (tmp_path / "a.wav").write_bytes(riff(format_chunk(3, bits=32), chunk(b"data", content)))
    with pytest.raises(UnreadableError, match="not finite"):
        wav_file(tmp_path / "a.wav").read()
    content = np.array([1e300], "<f8").tobytes()
    (tmp_path / "a.wav").write_bytes(riff(format_chunk(3, bits=64), chunk(b"data", content)))
    with pytest.raises(UnreadableError, match="not finite"):
        wav_file(tmp_path / "a.wav").read()
    os.mkfifo(tmp_path / "pipe.wav")
    with pytest.raises(UnreadableError, match="not a regular file"):
        wav_file(tmp_path / "pipe.wav")

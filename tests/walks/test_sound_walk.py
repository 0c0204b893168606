"""WAV files to a file that takes raw samples, which bare onnxruntime runs."""

from __future__ import annotations

import json
import sys
import wave
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.kit import wav_writing

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import sound_walk  # noqa: E402

pytestmark = pytest.mark.slow


def samples_of(path: Path, length: int) -> np.ndarray:
    """The middle of a file, as Python's own module reads it."""
    with wave.open(str(path), "rb") as file:
        whole = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    first = max(0, (len(whole) - length) // 2)
    middle = whole[first : first + length]
    before = (length - len(middle)) // 2
    return np.pad(middle, (before, length - len(middle) - before))


@pytest.mark.sweep(0)
def test_sounds_are_told_apart_by_what_bare_onnxruntime_runs(tmp_path: Path) -> None:
    wav_writing.sounds(tmp_path / "train", 30)
    wav_writing.sounds(tmp_path / "test", 15, seed=1)
    accuracy = sound_walk.train(tmp_path, epochs=16)
    assert accuracy > 0.85
    said = {p.key: p.value for p in onnx.load(tmp_path / "trained.onnx").metadata_props}
    names = json.loads(said["gradgraph.data"])
    files = sorted((tmp_path / "test").glob("*/*.wav"))
    samples = np.stack([samples_of(path, names["sounds"]["samples"]["length"]) for path in files])
    session = ort.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    scores = session.run(None, {"samples": samples})[0]
    called = [names["classes"]["target"][i] for i in scores.argmax(axis=1)]
    right = np.mean([name == path.parent.name for name, path in zip(called, files, strict=True)])
    assert right == pytest.approx(accuracy, abs=1e-6)

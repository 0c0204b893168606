"""Recordings as raw samples, as by transformers' ``Wav2Vec2FeatureExtractor``, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradgraph.sound.mel_filters import Array

AXES = 2  # of a batch: [batch, samples]
_SMALLEST = 1e-7  # added to the variance


@dataclass(frozen=True)
class Waveforms:
    """A function from a recording to the samples that a model reads.

    Attributes:
        rate: samples per second.
        shortest: the minimum number of samples of a recording.
        normalises: whether recordings are scaled to mean 0 and variance 1.
        samples: the maximum number of samples of a recording; None if there is none.
    """

    rate: int = 16000
    shortest: int = 1
    normalises: bool = False
    samples: int | None = None
    axes = AXES
    provides = "samples and their mask"  # in messages

    def __call__(self, sound: Array) -> Array:
        """Return the samples that a model reads: float32 [samples], as is ``sound``."""
        if not self.normalises:
            return sound
        scaled: Array = (sound - sound.mean()) / np.sqrt(sound.var() + _SMALLEST)
        return scaled.astype(np.float32)

    def batch(self, sounds: Sequence[Array]) -> dict[str, Array]:
        """Return recordings padded with silence to the longest, float32 [batch, samples], and 1 for their samples."""
        shape = len(sounds), max(map(len, sounds))
        read, mask = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
        for i, sound in enumerate(sounds):
            read[i, : len(sound)], mask[i, : len(sound)] = sound, 1
        return {"read": read, "mask": mask}

"""The spectrograms of transformers' ``WhisperFeatureExtractor``, in NumPy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradgraph.sound.mel_filters import CONVENTIONS, Array, filters

HIGHEST = 8000  # the highest frequency in Hz, at any sampling rate


@dataclass(frozen=True)
class WhisperFeatures:
    """A function from a recording to its log-mel spectrogram.

    Attributes:
        rate: samples per second.
        samples: number of samples to which recordings are padded with silence.
        n_fft: samples per frame.
        hop: samples between frames.
        mels: number of mel bands.
    """

    rate: int = 16000
    samples: int = 480_000
    n_fft: int = 400
    hop: int = 160
    mels: int = 80
    shortest = 1  # minimum number of samples of a recording
    axes = 3  # of a batch
    provides = "spectrograms"  # in messages

    @property
    def frames(self) -> int:
        """The number of frames of a spectrogram."""
        return self.samples // self.hop

    @functools.cached_property
    def _filters(self) -> Array:
        return filters(CONVENTIONS["whisper"], self.n_fft, self.rate, self.mels, 0, HIGHEST)

    def __call__(self, sound: Array) -> Array:
        """Return the spectrogram of a recording, whose samples after the first ``samples`` are ignored.

        It is computed in float64.

        Args:
            sound: samples from −1 to 1: floats [samples].

        Returns:
            float32 [mels, frames].
        """
        known = sound[: self.samples].astype(np.float64)
        whole = np.pad(known, (0, self.samples - len(known)))
        centred = np.pad(whole, self.n_fft // 2, mode="reflect")
        parts = np.lib.stride_tricks.sliding_window_view(centred, self.n_fft)[:: self.hop][: self.frames]
        window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.n_fft) / self.n_fft)
        energy = np.abs(np.fft.rfft(parts * window, axis=-1)) ** 2
        found = np.log10(np.maximum(self._filters @ energy.T, 1e-10))
        made: Array = (np.maximum(found, found.max() - 8.0) + 4.0) / 4.0
        return made.astype(np.float32)

    def batch(self, spectrograms: Sequence[Array]) -> dict[str, Array]:
        """Return spectrograms as one array: float32 [batch, mels, frames]."""
        return {"read": np.stack(spectrograms)}

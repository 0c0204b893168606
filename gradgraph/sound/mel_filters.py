"""Constants of log-mel spectrograms: windows, Fourier bases, mel filters.

Sources: librosa.filters.mel (Slaney's Auditory Toolbox, 1998), torchaudio.functional.melscale_fbanks (HTK's formula),
torchaudio.compliance.kaldi.fbank (Kaldi's feature-window.cc and mel-computations.cc), and whisper/audio.py of OpenAI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Convention:
    """A convention for log-mel spectrograms.

    Attributes:
        scale: mel scale: Slaney's (linear up to 1 kHz), HTK's, or HTK's with triangles in mel space (Kaldi).
        slaney_norm: normalise filters to unit area instead of unit height.
        window: periodic Hann window, or Povey's (symmetric Hann to the power of 0.85).
        pad: padding mode of half a frame at either end, which centres frames; None for no padding.
        drop_last: drop the last frame.
        power_of_two: round the transform size up to a power of two.
        subtract_mean, preemphasis: applied to each frame before the window.
        low: default lowest frequency of the mel bands, in Hz.
        floor: lower bound of the energy before the logarithm.
        decibels: 10 log10 instead of the natural logarithm.
        below_peak: dynamic range: values more than this below the maximum of a sound are clipped; in decibels, or in
            units of log10 for ``whisper``.
        whisper: Whisper's normalisation: log10, plus 4, divided by 4.
        time_first: whether frames precede mel bands in the spectrogram.
    """

    scale: Literal["slaney", "htk", "kaldi"]
    slaney_norm: bool = False
    window: Literal["hann", "povey"] = "hann"
    pad: Literal["reflect", "constant"] | None = "reflect"
    drop_last: bool = False
    power_of_two: bool = False
    subtract_mean: bool = False
    preemphasis: float = 0.0
    low: float = 0.0
    floor: float = 1e-10
    decibels: bool = False
    below_peak: float | None = None
    whisper: bool = False
    time_first: bool = False


CONVENTIONS = {
    "whisper": Convention("slaney", slaney_norm=True, drop_last=True, below_peak=8.0, whisper=True),
    "librosa": Convention("slaney", slaney_norm=True, pad="constant", decibels=True, below_peak=80.0),
    "torchaudio": Convention("htk", decibels=True),
    "kaldi": Convention("kaldi", window="povey", pad=None, power_of_two=True, subtract_mean=True, preemphasis=0.97,
                        low=20.0, floor=float(np.finfo(np.float32).eps), time_first=True),
}  # fmt: skip


def transform_size(convention: Convention, n_fft: int) -> int:
    """Return the size of the Fourier transform of a frame."""
    return 1 << (n_fft - 1).bit_length() if convention.power_of_two else n_fft


def bases(convention: Convention, n_fft: int) -> tuple[Array, Array]:
    """Return the Fourier transform of a frame as two matrices, real and imaginary: float64 [frequencies, n_fft] each.

    They include window, preemphasis and the subtraction of the mean, which are linear.
    """
    n = np.arange(n_fft)
    if convention.window == "povey":
        window = (0.5 - 0.5 * np.cos(2 * np.pi * n / (n_fft - 1))) ** 0.85
    else:
        window = 0.5 - 0.5 * np.cos(2 * np.pi * n / n_fft)
    size = transform_size(convention, n_fft)
    turns = (np.arange(size // 2 + 1)[:, None] * n % size) * (2 * np.pi / size)
    before = np.diag(window)
    if convention.preemphasis:
        previous = np.maximum(n - 1, 0)
        before = before @ (np.eye(n_fft) - convention.preemphasis * np.eye(n_fft)[previous])
    if convention.subtract_mean:
        before = before @ (np.eye(n_fft) - 1 / n_fft)
    return np.cos(turns) @ before, -np.sin(turns) @ before


def filters(convention: Convention, n_fft: int, rate: int, mels: int, low: float, high: float) -> Array:
    """Return the mel filter bank: float64 [mels, frequencies].

    ``rate`` is in samples per second, ``low`` and ``high`` are in Hz.
    """
    size = transform_size(convention, n_fft)
    frequencies = np.arange(size // 2 + 1) * (rate / size)
    edges = np.linspace(_mel(convention, low), _mel(convention, high), mels + 2)
    if convention.scale == "kaldi":
        points = _mel(convention, frequencies)
    else:
        edges, points = _hertz(convention, edges), frequencies
    rising = (points - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - points) / np.diff(edges)[1:, None]
    found: Array = np.maximum(0, np.minimum(rising, falling))
    if convention.scale == "kaldi":
        found[:, -1] = 0  # Kaldi omits the Nyquist frequency
    return found * (2 / (edges[2:] - edges[:-2]))[:, None] if convention.slaney_norm else found


_BEND, _STEP = 1000.0, np.log(6.4) / 27  # Slaney's scale is linear up to 1 kHz (15 mel), then logarithmic


def _mel(convention: Convention, hertz: Any) -> Any:
    hertz = np.asarray(hertz, np.float64)
    if convention.scale != "slaney":
        return 1127 * np.log1p(hertz / 700) if convention.scale == "kaldi" else 2595 * np.log10(1 + hertz / 700)
    return np.where(hertz < _BEND, hertz * 3 / 200, 15 + np.log(np.maximum(hertz, _BEND) / _BEND) / _STEP)


def _hertz(convention: Convention, mel: Array) -> Array:
    if convention.scale == "htk":
        return np.asarray(700 * (10 ** (mel / 2595) - 1))
    return np.where(mel < 15, mel * 200 / 3, _BEND * np.exp(_STEP * (mel - 15)))

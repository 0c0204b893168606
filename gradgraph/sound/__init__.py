"""Sounds: WAV files as raw samples, and log-mel spectrograms as ONNX nodes in front of a model.

It knows how spectrograms are made (as Whisper, Kaldi, librosa and torchaudio do), and which samples of a file a model
gets; it must not know how a model is trained: it gives datasets and models to those that train.
"""

from __future__ import annotations

from gradgraph.sound.log_mel import log_mel
from gradgraph.sound.mel_filters import CONVENTIONS, Convention
from gradgraph.sound.sounds import Sounds, folder, table

__all__ = ["CONVENTIONS", "Convention", "Sounds", "folder", "log_mel", "table"]


def __dir__() -> list[str]:
    return sorted(__all__)

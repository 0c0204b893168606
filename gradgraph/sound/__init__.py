"""Sounds: WAV files as raw samples, and log-mel spectrograms as ONNX nodes at the start of a model.

Spectrograms follow the conventions of Whisper, Kaldi, librosa and torchaudio. This package only provides datasets and
models; it must not depend on how a model is trained.
"""

from __future__ import annotations

from gradgraph.sound.log_mel import log_mel
from gradgraph.sound.mel_filters import CONVENTIONS, Convention
from gradgraph.sound.sounds import Sounds, folder, table

__all__ = ["CONVENTIONS", "Convention", "Sounds", "folder", "log_mel", "table"]


def __dir__() -> list[str]:
    return sorted(__all__)

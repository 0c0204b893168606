"""The public functions for sounds: WAV files as raw samples, and log-mel spectrograms as ONNX nodes.

The datasets are in ``gradgraph.data.sounds``. Spectrograms are an edit of a model and are defined here; they follow the
conventions of Whisper, Kaldi, librosa and torchaudio.
"""

from __future__ import annotations

from gradgraph.data.sounds import Sounds, folder, table
from gradgraph.sound.log_mel import log_mel
from gradgraph.sound.mel_filters import CONVENTIONS, Convention

__all__ = ["CONVENTIONS", "Convention", "Sounds", "folder", "log_mel", "table"]


def __dir__() -> list[str]:
    return sorted(__all__)

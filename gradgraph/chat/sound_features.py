"""The feature extractor of a folder: what its encoder reads of a recording, spectrograms or samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import onnx_ir as ir

from gradgraph.arguments import described
from gradgraph.chat.task_request import Request
from gradgraph.data.sounds import MOST_SAMPLES
from gradgraph.data.texts.tokenizer_files import table_in
from gradgraph.errors import DataError, shown
from gradgraph.files.models import load_model
from gradgraph.graph.shape_inference import shape_of
from gradgraph.sound.waveforms import Waveforms
from gradgraph.sound.whisper_features import HIGHEST, WhisperFeatures

EXTRACTOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
WHISPER, WAVEFORM = "WhisperFeatureExtractor", "Wav2Vec2FeatureExtractor"
Features: TypeAlias = WhisperFeatures | Waveforms


def is_whisper(request: Request) -> bool:
    """Whether a folder has Whisper's feature extractor; raise DataError if it has an unsupported one."""
    return _Settings(request).kind == WHISPER


def features_of(request: Request) -> Features:
    """Return the feature extractor of a folder.

    Raises:
        DataError: the folder has no supported one, or its encoder expects other spectrograms.
    """
    settings, encoder = _Settings(request), load_model(request.base.encoder())
    settings.check({"dither": 0.0, "padding_side": "right", "padding_value": 0.0})
    if settings.kind == WHISPER:
        return _of_whisper(settings, encoder)
    settings.check({"feature_size": 1})
    normalises = settings.content.get("do_normalize", True)
    return Waveforms(settings.whole("sampling_rate", 16000), _shortest(encoder), bool(normalises))


class _Settings:
    """The settings of a folder's feature extractor, checked as they are read: its file, kind and content."""

    def __init__(self, request: Request) -> None:
        folder = request.base.path
        name, found = EXTRACTOR, table_in(folder, EXTRACTOR)
        if not found:  # transformers 5 writes one file for tokenizer and feature extractor
            name, found = PROCESSOR, table_in(folder, PROCESSOR).get("feature_extractor") or {}
        self.file, self.content = folder / name, found
        self.kind = found.get("feature_extractor_type") if isinstance(found, Mapping) else None
        if self.kind not in (WHISPER, WAVEFORM):
            what = f"the feature extractor {shown(self.kind)}" if isinstance(self.kind, str) else f"no {EXTRACTOR}"
            raise DataError(
                f"the folder '{shown(folder)}' has {what}, but {request.recipe.task} requires {WHISPER}, or {WAVEFORM} "
                "for Moonshine"
            )

    def check(self, usual: Mapping[str, Any]) -> None:
        """Raise DataError if a setting is none of the supported ones, ``usual``."""
        for key, value in usual.items():
            if self.content.get(key, value) != value:
                self.refuse(key)

    def refuse(self, key: str) -> None:
        """Raise DataError for the value of a setting."""
        raise DataError(
            f"'{key}' in '{shown(self.file)}' is {described(self.content.get(key))}, which is not supported; use the "
            "file of the model"
        )

    def whole(self, key: str, usual: int) -> int:
        """Return a whole number above zero, or ``usual`` if there is none."""
        value = self.content.get(key, usual)
        if type(value) is not int or not 0 < value <= MOST_SAMPLES:
            raise DataError(f"'{key}' in '{shown(self.file)}' is {described(value)}, but should be a whole number "
                            "above zero; download the file again")  # fmt: skip
        return value


def _of_whisper(settings: _Settings, encoder: ir.Model) -> WhisperFeatures:
    rate, hop = settings.whole("sampling_rate", 16000), settings.whole("hop_length", 160)
    samples, n_fft = settings.whole("chunk_length", 30) * rate, settings.whole("n_fft", 400)
    mels = settings.whole("feature_size", 80)
    if rate < 2 * HIGHEST:
        settings.refuse("sampling_rate")
    if hop > samples or not n_fft < samples <= MOST_SAMPLES or samples // hop * n_fft > MOST_SAMPLES:
        settings.refuse("n_fft")
    made = WhisperFeatures(rate, samples, n_fft, hop, mels)
    read = next((shape for v in encoder.graph.inputs if (shape := shape_of(v)) is not None and len(shape) == 3),
                (None, None, None))  # fmt: skip
    if any(isinstance(size, int) and size != own for size, own in zip(read[1:], (mels, made.frames), strict=True)):
        raise DataError(
            f"the encoder reads spectrograms of {read[1]} × {read[2]}, but '{shown(settings.file)}' describes {mels} × "
            f"{made.frames}; use the file of the model"
        )
    return made


def _shortest(encoder: ir.Model) -> int:
    """Return the number of samples that an encoder reads for its first state: by its convolutions, without padding."""
    length = 1
    for node in reversed([node for node in encoder.graph if node.op_type == "Conv"]):
        shape, strides = shape_of(node.inputs[1]), node.attributes.get("strides")
        if shape is not None and len(shape) == 3 and isinstance(shape[2], int):
            length = (length - 1) * (strides.as_ints()[0] if strides is not None else 1) + shape[2]
    return length

"""Ways that people go from a network of PyTorch to a file: its two exporters, and Hugging Face's optimum."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


def by_dynamo(
    network: Any, example: Mapping[str, Any], outputs: Sequence[str], folder: Path, optimize: bool = True
) -> Path:
    """What ``torch.onnx.export`` does by default."""
    import torch

    sizes = [{0: "batch"} if x.ndim > 2 else {0: "batch", 1: "sequence"} for x in example.values()]
    torch.onnx.export(
        network, tuple(example.values()), folder / "model.onnx", input_names=list(example), output_names=list(outputs),
        dynamic_shapes=sizes, dynamo=True, optimize=optimize, verbose=False,
    )  # fmt: skip
    return folder / "model.onnx"


def by_dynamo_as_it_stands(network: Any, example: Mapping[str, Any], outputs: Sequence[str], folder: Path) -> Path:
    """Without optimisation, so that BatchNormalization is not merged into convolutions."""
    return by_dynamo(network, example, outputs, folder, optimize=False)


def by_torchscript(
    network: Any, example: Mapping[str, Any], outputs: Sequence[str], folder: Path, training: bool = False
) -> Path:
    """The older exporter."""
    import torch

    axes = {name: {0: "batch"} if x.ndim > 2 else {0: "batch", 1: "sequence"} for name, x in example.items()}
    mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network, tuple(example.values()), folder / "model.onnx", input_names=list(example),
            output_names=list(outputs), dynamic_axes=axes | {name: {0: "batch"} for name in outputs},
            dynamo=False, training=mode,
        )  # fmt: skip
    return folder / "model.onnx"


def by_torchscript_in_training(network: Any, example: Mapping[str, Any], outputs: Sequence[str], folder: Path) -> Path:
    """With ``training=TrainingMode.TRAINING``, so that BatchNormalization is not merged into convolutions."""
    return by_torchscript(network, example, outputs, folder, training=True)


def by_optimum(network: Any, task: str, folder: Path) -> Path:
    """``optimum-cli export onnx --model theirs/ --task … out/``; of two files, the decoder."""
    exporters = pytest.importorskip(
        "optimum.exporters.onnx", reason="optimum's exporter is in no extra; `make shipped-models` runs it"
    )
    network.save_pretrained(folder / "theirs")
    exporters.main_export(str(folder / "theirs"), folder / "out", task=task)
    decoder = folder / "out" / "decoder_model.onnx"
    return decoder if decoder.exists() else folder / "out" / "model.onnx"

"""The networks to train: names, sizes, batches and targets. It imports only NumPy, so every environment can read it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Input:
    """An input of a network: normally distributed floats, or integers below ``high``."""

    name: str
    shape: tuple[int, ...]
    high: int = 0

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        if self.high:
            return rng.integers(0, self.high, self.shape)
        return rng.normal(size=self.shape).astype(np.float32)


@dataclass(frozen=True)
class Workload:
    """A network to train: one row of the table.

    Args:
        title: the network and its sizes.
        x: the input; its first axis is the batch.
        target: class indices for cross-entropy, or values for the mean squared error.
        further: inputs after ``x``.
        loss: "cross_entropy" or "mse".
        attends: whether it has attention probabilities that can be recomputed.
    """

    title: str
    x: Input
    target: Input
    further: tuple[Input, ...] = ()
    loss: str = "cross_entropy"
    attends: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the network's inputs, in order."""
        return self.x.name, *(i.name for i in self.further)

    def batch(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        return {i.name: i.draw(rng) for i in (self.x, *self.further, self.target)}


def _labels(classes: int, *shape: int) -> Input:
    return Input("target", shape, classes)


def _images(*shape: int) -> Input:
    return Input("x", shape)


def _tokens(vocabulary: int, *shape: int) -> Input:
    return Input("x", shape, vocabulary)


WORKLOADS = {
    "mlp": Workload("MLP 784-512-512-10, batch 128", _images(128, 784), _labels(10, 128)),
    "cnn": Workload("CNN 2 x conv5x5, 64x1x28x28", _images(64, 1, 28, 28), _labels(10, 64)),
    "resnet18": Workload("ResNet-18, 32x3x64x64", _images(32, 3, 64, 64), _labels(1000, 32)),
    "mobilenetv2": Workload("MobileNetV2, 32x3x96x96", _images(32, 3, 96, 96), _labels(1000, 32)),
    "mobilenetv3": Workload("MobileNetV3-small, 32x3x96x96", _images(32, 3, 96, 96), _labels(1000, 32)),
    "efficientnet": Workload("EfficientNet-B0, 16x3x96x96", _images(16, 3, 96, 96), _labels(1000, 16)),
    "convnext": Workload("ConvNeXt 48-384, 16x3x96x96", _images(16, 3, 96, 96), _labels(1000, 16)),
    "tcn": Workload("TCN 6 x 64, 32x16x256", _images(32, 16, 256), _labels(10, 32)),
    "unet": Workload("U-Net 32-256, 8x1x128x128", _images(8, 1, 128, 128), _labels(2, 8, 128, 128)),
    "gpt": Workload("GPT L4 D256 H4 V1000, 8x128", _tokens(1000, 8, 128), _labels(1000, 8 * 128)),
    "bert": Workload("BERT-mini L4 D256 H4 FF1024, 16x128", _tokens(30522, 16, 128), _labels(2, 16)),
    "lstm": Workload("LSTM 2x256, 32x64", _tokens(128, 32, 64), _labels(128, 32 * 64)),
}

LARGE = {  # for a CUDA device
    "resnet50": Workload("ResNet-50, 64x3x224x224", _images(64, 3, 224, 224), _labels(1000, 64)),
    "gpt2": Workload("GPT-2 L12 D768 H12, 8x512", _tokens(50257, 8, 512), _labels(50257, 8 * 512)),
}

REAL = {  # of real sizes
    "resnet50-224": Workload("ResNet-50, 16x3x224x224", _images(16, 3, 224, 224), _labels(1000, 16)),
    "mobilenetv3-224": Workload("MobileNetV3-Large, 32x3x224x224", _images(32, 3, 224, 224), _labels(1000, 32)),
    "vit-b16": Workload("ViT-B/16, 8x3x224x224", _images(8, 3, 224, 224), _labels(1000, 8), attends=True),
    "bert-base": Workload(
        "BERT-base, 8x128", _tokens(30522, 8, 128), _labels(2, 8), further=(Input("mask", (8, 128), 2),), attends=True
    ),
    "gpt2-124m": Workload("GPT-2 124M, 2x512", _tokens(50257, 2, 512), _labels(50257, 2 * 512), attends=True),
    "whisper-base": Workload(
        "Whisper-base, 2x80x3000, 64 tokens",
        _images(2, 80, 3000),
        _labels(51865, 2 * 64),
        further=(Input("tokens", (2, 64), 51865),),
        attends=True,
    ),
    "diffusion-unet": Workload(
        "Stable Diffusion's U-Net 64-256, 4x4x32x32",
        _images(4, 4, 32, 32),
        Input("target", (4, 4, 32, 32)),
        further=(Input("time", (4,), 1000), Input("text", (4, 77, 256))),
        loss="mse",
        attends=True,
    ),
}

ALL = WORKLOADS | LARGE | REAL
SIZES = {"small": WORKLOADS, "real": REAL}

LEARNING_RATES = {"sgd": 0.01, "adamw": 1e-4}
ALSO_ADAMW = ("mlp", "gpt")  # AdamW has many passes over memory; in a small step and in a large one

"""A small FCOS in torch, as somebody might bring it: what both walks of detectors train."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

SIZE, STRIDE, CLASSES = 64, 8, 3


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [(3, 16, 2), (16, 32, 2), (32, 48, 2), (48, 48, 1)]
        layers = [[nn.Conv2d(a, b, 3, s, 1), nn.BatchNorm2d(b), nn.ReLU()] for a, b, s in widths]
        self.body = nn.Sequential(*(layer for block in layers for layer in block))
        self.head = nn.Conv2d(48, CLASSES + 5, 3, padding=1)
        nn.init.constant_(self.head.bias[:CLASSES], -3.0)

    def forward(self, image: Any) -> Any:
        each = self.head(self.body(image)).flatten(2).transpose(1, 2)
        logits, sides, centre = each.split([CLASSES, 4, 1], 2)
        return logits, torch.exp(sides), centre


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def exported(path: Path) -> Path:
    names = ["image", "logits", "distances", "centerness"]
    training = torch.onnx.TrainingMode.TRAINING  # else batch normalisation is folded into convolutions
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network(), torch.zeros(2, 3, SIZE, SIZE), str(path), input_names=names[:1],
                          output_names=names[1:], dynamic_axes={name: {0: "batch"} for name in names}, dynamo=False,
                          training=training, do_constant_folding=False)  # fmt: skip
    return path

"""torchvision without compiled operators for this PyTorch: its networks need none, but its import asks for some."""

from __future__ import annotations

import contextlib

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # what it declares lasts as long as it does


def declare() -> None:
    """Name what ``import torchvision`` looks up; call it before."""
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # they are there
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

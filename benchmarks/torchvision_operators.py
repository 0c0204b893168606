"""Declarations that let torchvision be imported without its compiled operators, which its networks do not need."""

from __future__ import annotations

import contextlib

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # declarations last as long as this object


def declare() -> None:
    """Declare the operators that ``import torchvision`` looks up; call it before the import."""
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # already declared
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

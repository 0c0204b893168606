"""Losses as blocks."""

from gradgraph.compat.onnxruntime_training.onnxblock.loss.loss_blocks import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    L1Loss,
    MSELoss,
)

__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "MSELoss"]

"""Losses as layers, with PyTorch's arguments and defaults: the functions of ``functional`` with fixed options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gradgraph.frontend import (
    losses_classes,
    losses_embeddings,
    losses_margins,
    losses_regions,
    losses_sequences,
    losses_values,
)
from gradgraph.frontend.module import Module

__all__ = [
    "BCELoss",
    "BCEWithLogitsLoss",
    "CLIPLoss",
    "CTCLoss",
    "CosineEmbeddingLoss",
    "CrossEntropyLoss",
    "DiceLoss",
    "FocalLoss",
    "GaussianNLLLoss",
    "HingeEmbeddingLoss",
    "HingeLoss",
    "HuberLoss",
    "InfoNCELoss",
    "KLDivLoss",
    "L1Loss",
    "LogCoshLoss",
    "MSELoss",
    "MultiLabelMarginLoss",
    "MultiLabelSoftMarginLoss",
    "MultiMarginLoss",
    "NLLLoss",
    "PoissonNLLLoss",
    "SigmoidFocalLoss",
    "SmoothL1Loss",
    "SoftCrossEntropyLoss",
    "SoftMarginLoss",
    "TripletMarginLoss",
]


class _Loss(Module):
    """The base of losses as layers: options when it is made, tensors when it is called."""

    _computes: Callable[..., Any]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        bound = inspect.signature(type(self)).bind(*arguments, **options)
        bound.apply_defaults()
        self.options = dict(bound.arguments)

    def forward(self, *tensors: Any) -> Any:
        return type(self)._computes(*tensors, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value is not None)


_FAMILIES = (
    losses_classes,
    losses_embeddings,
    losses_margins,
    losses_regions,
    losses_sequences,
    losses_values,
)


def _plain(name: str) -> str:
    """What ``HingeLoss`` and ``hinge_loss`` have in common."""
    return name.lower().replace("_", "").removesuffix("loss").replace("binarycrossentropy", "bce")


_FUNCTIONS = {_plain(name): getattr(family, name) for family in _FAMILIES for name in family.__all__}


def _layer(name: str, options: str) -> type[_Loss]:
    """The layer of the function of that name, whose ``options`` it has in this order."""
    function: Callable[..., Any] = _FUNCTIONS[_plain(name)]
    known = inspect.signature(function).parameters
    given = [known[option].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for option in options.split()]
    members = {
        "__doc__": function.__doc__,
        "__module__": __name__,
        "__signature__": inspect.Signature(given),
        "_computes": staticmethod(function),
    }
    return type(name, (_Loss,), members)


BCELoss = _layer("BCELoss", "weight reduction")
BCEWithLogitsLoss = _layer("BCEWithLogitsLoss", "weight reduction pos_weight")
CLIPLoss = _layer("CLIPLoss", "logit_scale reduction")
CosineEmbeddingLoss = _layer("CosineEmbeddingLoss", "margin reduction")
CrossEntropyLoss = _layer("CrossEntropyLoss", "weight ignore_index reduction label_smoothing")
CTCLoss = _layer("CTCLoss", "blank reduction zero_infinity")
DiceLoss = _layer("DiceLoss", "smooth activation reduction")
FocalLoss = _layer("FocalLoss", "gamma weight ignore_index reduction axis")
GaussianNLLLoss = _layer("GaussianNLLLoss", "full eps reduction")
HingeEmbeddingLoss = _layer("HingeEmbeddingLoss", "margin reduction")
HingeLoss = _layer("HingeLoss", "margin squared reduction")
HuberLoss = _layer("HuberLoss", "reduction delta")
InfoNCELoss = _layer("InfoNCELoss", "temperature reduction")
KLDivLoss = _layer("KLDivLoss", "reduction log_target")
L1Loss = _layer("L1Loss", "reduction")
LogCoshLoss = _layer("LogCoshLoss", "reduction")
MSELoss = _layer("MSELoss", "reduction")
MultiLabelMarginLoss = _layer("MultiLabelMarginLoss", "reduction")
MultiLabelSoftMarginLoss = _layer("MultiLabelSoftMarginLoss", "weight reduction")
MultiMarginLoss = _layer("MultiMarginLoss", "p margin weight reduction")
NLLLoss = _layer("NLLLoss", "weight ignore_index reduction")
PoissonNLLLoss = _layer("PoissonNLLLoss", "log_input full eps reduction")
SigmoidFocalLoss = _layer("SigmoidFocalLoss", "alpha gamma reduction")
SmoothL1Loss = _layer("SmoothL1Loss", "reduction beta")
SoftCrossEntropyLoss = _layer("SoftCrossEntropyLoss", "weight reduction label_smoothing axis")
SoftMarginLoss = _layer("SoftMarginLoss", "reduction")
TripletMarginLoss = _layer("TripletMarginLoss", "margin p eps swap reduction")

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


def _layer(name: str, function: Callable[..., Any], options: str) -> type[_Loss]:
    """The layer of ``function``, whose ``options`` it has in this order."""
    known = inspect.signature(function).parameters
    given = [known[option].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for option in options.split()]
    members = {
        "__doc__": function.__doc__,
        "__module__": __name__,
        "__signature__": inspect.Signature(given),
        "_computes": staticmethod(function),
    }
    return type(name, (_Loss,), members)


BCELoss = _layer("BCELoss", losses_values.binary_cross_entropy, "weight reduction")
BCEWithLogitsLoss = _layer(
    "BCEWithLogitsLoss", losses_values.binary_cross_entropy_with_logits, "weight reduction pos_weight"
)
CLIPLoss = _layer("CLIPLoss", losses_embeddings.clip_loss, "logit_scale reduction")
CosineEmbeddingLoss = _layer("CosineEmbeddingLoss", losses_embeddings.cosine_embedding_loss, "margin reduction")
CrossEntropyLoss = _layer(
    "CrossEntropyLoss", losses_classes.cross_entropy, "weight ignore_index reduction label_smoothing"
)
CTCLoss = _layer("CTCLoss", losses_sequences.ctc_loss, "blank reduction zero_infinity")
DiceLoss = _layer("DiceLoss", losses_regions.dice_loss, "smooth activation reduction")
FocalLoss = _layer("FocalLoss", losses_regions.focal_loss, "gamma weight ignore_index reduction axis")
GaussianNLLLoss = _layer("GaussianNLLLoss", losses_values.gaussian_nll_loss, "full eps reduction")
HingeEmbeddingLoss = _layer("HingeEmbeddingLoss", losses_margins.hinge_embedding_loss, "margin reduction")
HingeLoss = _layer("HingeLoss", losses_margins.hinge_loss, "margin squared reduction")
HuberLoss = _layer("HuberLoss", losses_values.huber_loss, "reduction delta")
InfoNCELoss = _layer("InfoNCELoss", losses_embeddings.info_nce_loss, "temperature reduction")
KLDivLoss = _layer("KLDivLoss", losses_values.kl_div, "reduction log_target")
L1Loss = _layer("L1Loss", losses_values.l1_loss, "reduction")
LogCoshLoss = _layer("LogCoshLoss", losses_values.log_cosh_loss, "reduction")
MSELoss = _layer("MSELoss", losses_values.mse_loss, "reduction")
MultiLabelMarginLoss = _layer("MultiLabelMarginLoss", losses_margins.multilabel_margin_loss, "reduction")
MultiLabelSoftMarginLoss = _layer(
    "MultiLabelSoftMarginLoss", losses_margins.multilabel_soft_margin_loss, "weight reduction"
)
MultiMarginLoss = _layer("MultiMarginLoss", losses_margins.multi_margin_loss, "p margin weight reduction")
NLLLoss = _layer("NLLLoss", losses_classes.nll_loss, "weight ignore_index reduction")
PoissonNLLLoss = _layer("PoissonNLLLoss", losses_values.poisson_nll_loss, "log_input full eps reduction")
SigmoidFocalLoss = _layer("SigmoidFocalLoss", losses_regions.sigmoid_focal_loss, "alpha gamma reduction")
SmoothL1Loss = _layer("SmoothL1Loss", losses_values.smooth_l1_loss, "reduction beta")
SoftCrossEntropyLoss = _layer(
    "SoftCrossEntropyLoss", losses_classes.soft_cross_entropy, "weight reduction label_smoothing axis"
)
SoftMarginLoss = _layer("SoftMarginLoss", losses_margins.soft_margin_loss, "reduction")
TripletMarginLoss = _layer("TripletMarginLoss", losses_embeddings.triplet_margin_loss, "margin p eps swap reduction")

"""Losses as layers, with PyTorch's arguments and defaults: the functions of ``functional`` with fixed options."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from gradgraph.frontend import (
    losses_classes,
    losses_embeddings,
    losses_margins,
    losses_regions,
    losses_sequences,
    losses_values,
)
from gradgraph.frontend.function_layers import layer_of
from gradgraph.frontend.module import layers_in

layer = functools.partial(layer_of, __name__)

BCELoss = layer("BCELoss", losses_values.binary_cross_entropy, "weight reduction")
BCEWithLogitsLoss = layer(
    "BCEWithLogitsLoss", losses_values.binary_cross_entropy_with_logits, "weight reduction pos_weight"
)
CLIPLoss = layer("CLIPLoss", losses_embeddings.clip_loss, "logit_scale reduction")
CosineEmbeddingLoss = layer("CosineEmbeddingLoss", losses_embeddings.cosine_embedding_loss, "margin reduction")
CrossEntropyLoss = layer(
    "CrossEntropyLoss", losses_classes.cross_entropy, "weight ignore_index reduction label_smoothing"
)
CTCLoss = layer("CTCLoss", losses_sequences.ctc_loss, "blank reduction zero_infinity")
DiceLoss = layer("DiceLoss", losses_regions.dice_loss, "smooth activation reduction")
FocalLoss = layer("FocalLoss", losses_regions.focal_loss, "gamma weight ignore_index reduction axis")
GaussianNLLLoss = layer("GaussianNLLLoss", losses_values.gaussian_nll_loss, "full eps reduction")
HingeEmbeddingLoss = layer("HingeEmbeddingLoss", losses_margins.hinge_embedding_loss, "margin reduction")
HingeLoss = layer("HingeLoss", losses_margins.hinge_loss, "margin squared reduction")
HuberLoss = layer("HuberLoss", losses_values.huber_loss, "reduction delta")
InfoNCELoss = layer("InfoNCELoss", losses_embeddings.info_nce_loss, "temperature reduction")
KLDivLoss = layer("KLDivLoss", losses_values.kl_div, "reduction log_target")
L1Loss = layer("L1Loss", losses_values.l1_loss, "reduction")
LogCoshLoss = layer("LogCoshLoss", losses_values.log_cosh_loss, "reduction")
MSELoss = layer("MSELoss", losses_values.mse_loss, "reduction")
MultiLabelMarginLoss = layer("MultiLabelMarginLoss", losses_margins.multilabel_margin_loss, "reduction")
MultiLabelSoftMarginLoss = layer(
    "MultiLabelSoftMarginLoss", losses_margins.multilabel_soft_margin_loss, "weight reduction"
)
MultiMarginLoss = layer("MultiMarginLoss", losses_margins.multi_margin_loss, "p margin weight reduction")
NLLLoss = layer("NLLLoss", losses_classes.nll_loss, "weight ignore_index reduction")
PoissonNLLLoss = layer("PoissonNLLLoss", losses_values.poisson_nll_loss, "log_input full eps reduction")
SigmoidFocalLoss = layer("SigmoidFocalLoss", losses_regions.sigmoid_focal_loss, "alpha gamma reduction")
SmoothL1Loss = layer("SmoothL1Loss", losses_values.smooth_l1_loss, "reduction beta")
SoftCrossEntropyLoss = layer(
    "SoftCrossEntropyLoss", losses_classes.soft_cross_entropy, "weight reduction label_smoothing axis"
)
SoftMarginLoss = layer("SoftMarginLoss", losses_margins.soft_margin_loss, "reduction")
TripletMarginLoss = layer("TripletMarginLoss", losses_embeddings.triplet_margin_loss, "margin p eps swap reduction")


if not TYPE_CHECKING:
    __all__ = layers_in(globals())

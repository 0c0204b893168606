"""Embedding losses under PyTorch's names and arguments: they pull embeddings of matching samples together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradgraph.frontend import reductions
from gradgraph.frontend.loss import Target, named, over, positive, reduced
from gradgraph.frontend.losses_classes import cross_entropy
from gradgraph.frontend.pointwise import real, where
from gradgraph.frontend.products import normalize
from gradgraph.frontend.reductions import norm
from gradgraph.frontend.subscripts import arange
from gradgraph.frontend.trace import TensorLike, op, tensor, tensors

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["clip_loss", "cosine_embedding_loss", "info_nce_loss", "triplet_margin_loss"]


def cosine_embedding_loss(
    x1: TensorLike, x2: TensorLike, target: TensorLike, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """``1 − cos`` for targets 1, ``max(0, cos − margin)`` for targets −1 (``F.cosine_embedding_loss``)."""
    a, b = tensors(real(x1), x2)
    square_a, square_b = reductions.sum(a * a, -1) + 1e-12, reductions.sum(b * b, -1) + 1e-12
    cosine = reductions.sum(a * b, -1) / (square_a * square_b).sqrt()
    return reduced(where(tensor(target) > 0, 1.0 - cosine, op.Relu(cosine - margin)), reduction)


def triplet_margin_loss(
    anchor: TensorLike,
    positive: TensorLike,
    negative: TensorLike,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """``mean max(0, ‖a − p‖ − ‖a − n‖ + margin)`` of anchor, positive and negative samples (``F.triplet_margin_loss``).

    With ``swap``, the distance of positive and negative is used if it is smaller than that of anchor and negative.
    """
    a, b, c = tensors(real(anchor), positive, negative)
    near, far = norm(a - b + eps, p, -1), norm(a - c + eps, p, -1)
    if swap:
        far = op.Min(far, norm(b - c + eps, p, -1))
    return reduced(op.Relu(margin + near - far), reduction)


def info_nce_loss(query: TensorLike, key: TensorLike, temperature: float = 0.07, reduction: str = "mean") -> Tensor:
    """``mean −log softmax(cos(q, k)/T)[own]`` (InfoNCE): the cross entropy of classifying each query q among all keys k
    of the batch, where the key of the same row is the true class; T is the temperature.
    """
    scores = _cosines(query, key) / temperature
    return cross_entropy(scores, arange(scores.shape[0]), reduction=reduction)


def clip_loss(
    image: TensorLike, text: TensorLike, logit_scale: TensorLike = 1.0 / 0.07, reduction: str = "mean"
) -> Tensor:
    """The mean of ``info_nce`` from images to texts and from texts to images, with scores ``logit_scale·cos`` (CLIP).

    ``logit_scale`` may be a trained parameter.
    """
    scores = _cosines(image, text) * logit_scale
    own = arange(scores.shape[0])
    return (cross_entropy(scores, own, reduction=reduction) + cross_entropy(scores.mT, own, reduction=reduction)) * 0.5


def _cosines(x: TensorLike, y: TensorLike) -> Tensor:
    """Return the cosine of every row of ``x`` with every row of ``y``."""
    a, b = tensors(real(x), y)
    rows = a.shape[0]
    return op.MatMul(normalize(a, dim=-1), normalize(b, dim=-1).mT, shape=[rows, rows])


# --- names -----------------------------------------------------------------------------------------------


SAME = (Target("target", "−1 or 1, one per row",
               lambda outputs: over(outputs[0], range(outputs[0].rank - 1), outputs[0].dtype)),)  # fmt: skip

named("cosine_embedding", cosine_embedding_loss, "margin reduction", SAME, reads=("first", "second"))
named("triplet", triplet_margin_loss, "margin p eps swap reduction", (), reads=("anchor", "positive", "negative"))
named("info_nce", info_nce_loss, "temperature reduction", (), reads=("query", "key"), check=positive("temperature"))
named("clip", clip_loss, "logit_scale reduction", (), reads=("image", "text"), check=positive("logit_scale"))

"""Detection losses: they match predictions with objects, and compare the matches.

All losses have two targets: ``labels``, class indices int64 ``[B, N]``, padded with −1 for images with fewer than N
objects; and ``boxes`` ``[B, N, 4]``, each (centre x, centre y, width, height) relative to the image.
``gradgraph.vision`` reads both from COCO and YOLO files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, ModelError, shown
from gradgraph.frontend import reductions
from gradgraph.frontend.anchors import RATIOS, SCALES, STRIDES, anchors, checked_priors, checked_size, points
from gradgraph.frontend.assignment import linear_sum_assignment
from gradgraph.frontend.boxes import box_convert, corners, overlap, pairs, wide
from gradgraph.frontend.gradients import detach
from gradgraph.frontend.loss import Spec, Target, named
from gradgraph.frontend.losses_classes import cross_entropy
from gradgraph.frontend.losses_regions import sigmoid_focal_loss
from gradgraph.frontend.losses_values import binary_cross_entropy_with_logits, smooth_l1_loss
from gradgraph.frontend.pointwise import cast, logical_and, logical_or, maximum, minimum, sqrt, where
from gradgraph.frontend.reductions import argsort
from gradgraph.frontend.shaping import cat, stack
from gradgraph.frontend.subscripts import arange, full, gather
from gradgraph.frontend.trace import TensorLike, op, tensor
from gradgraph.graph.builder import Var

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["detr_loss", "fcos_loss", "retinanet_loss", "ssd_loss"]


class Objects(NamedTuple):
    """The objects of a batch of images, and a dummy object at the end of each row, so that no row is empty.

    Attributes:
        labels: class indices ``[B, N + 1]``; padding and the dummy have the label ``nothing``.
        boxes: boxes ``[B, N + 1, 4]``.
        real: whether an object is neither padding nor the dummy, bool ``[B, N + 1]``.
    """

    labels: Tensor
    boxes: Tensor
    real: Tensor

    @classmethod
    def of(cls, labels: TensorLike, boxes: TensorLike, nothing: int, dtype: ir.DataType) -> Objects:
        t, b = cast(labels, ir.DataType.INT64), cast(boxes, dtype)
        if (t.ndim, b.ndim) != (2, 3):
            raise ModelError(f"a detector got labels of shape {t.shape} and boxes of shape {b.shape}; expected [B, N] "
                             "and [B, N, 4]")  # fmt: skip
        batch = t.shape[0]
        t = cat([t, full((batch, 1), -1, "int64")], 1)
        return cls(where(t < 0, nothing, t), cat([b, full((batch, 1, 4), 0.0, dtype)], 1), t >= 0)

    def at(self, places: Tensor) -> Objects:
        """Return the objects at the indices ``places`` ``[B, Q]``; the dummy object for −1."""
        batch, count = places.shape
        i = where(places < 0, self.labels.shape[1] - 1, places)
        boxes = gather(self.boxes, 1, i.unsqueeze(-1).expand(batch, count, 4))
        return Objects(gather(self.labels, 1, i), boxes, places >= 0)


def _scores(logits: TensorLike, name: str) -> tuple[Tensor, int]:
    """Return the scores ``[B, Q, C]`` in float32 or wider, and the number of classes C, which must be fixed."""
    x = wide(logits)
    classes = x.shape[-1] if x.ndim == 3 else None
    if not isinstance(classes, int):
        raise ModelError(
            f"{name} expects scores of shape [images, predictions, classes] with a fixed number of classes, but got "
            f"{list(x.shape)}"
        )
    return x, classes


# --- one prediction per object ---------------------------------------------------------------------------


def detr_loss(
    logits: TensorLike,
    boxes: TensorLike,
    labels: TensorLike,
    target_boxes: TensorLike,
    no_object: float = 0.1,
    class_cost: float = 1.0,
    box_cost: float = 5.0,
    giou_cost: float = 2.0,
    class_weight: float = 1.0,
    box_weight: float = 5.0,
    giou_weight: float = 2.0,
) -> Tensor:
    """The loss of DETR: ``class_weight · cross entropy + box_weight · L1 + giou_weight · (1 − GIoU)`` of predictions.

    Each object is matched with one prediction, so that the sum of ``−class_cost · p[label] + box_cost · L1 −
    giou_cost · GIoU`` over all matches is minimal (Carion et al. 2020).

    Args:
        logits: scores ``[B, Q, C + 1]`` of Q predictions; the last class is "no object".
        boxes: ``[B, Q, 4]``: centre, width and height relative to the image, like the target boxes.
        labels, target_boxes: class indices ``[B, N]``, padded with −1, and boxes ``[B, N, 4]``. If an image has more
            than Q objects, the loss is NaN.
        no_object: the weight of the class "no object" in the cross entropy, a mean over all predictions.
        class_cost, box_cost, giou_cost: the factors of the matching cost.
        class_weight, box_weight, giou_weight: the factors of the loss terms. The terms of boxes are sums over objects,
            divided by the number of objects in the batch.
    """
    x, classes = _scores(logits, "detr")
    predicted = wide(boxes)
    objects = Objects.of(labels, target_boxes, classes - 1, x.dtype)
    costs = _assignment_costs(detach(x), detach(predicted), objects, class_cost, box_cost, giou_cost)
    met = objects.at(linear_sum_assignment(costs, objects.real))
    weight = where(met.real, tensor(1.0, x.dtype), no_object)
    named_wrong = cross_entropy(x, met.labels, None, -100, "none", axis=2) * weight
    total = class_weight * reductions.sum(named_wrong) / reductions.sum(weight)
    count = reductions.sum(cast(objects.real, x.dtype))
    apart = reductions.sum(op.Abs(predicted - met.boxes), -1)
    giou = overlap(corners(predicted, "cxcywh"), corners(met.boxes, "cxcywh")).giou
    placed_wrong = where(met.real, box_weight * apart + giou_weight * (1.0 - giou), 0.0)
    total = total + reductions.sum(placed_wrong) / maximum(count, 1.0)
    most = reductions.amax(reductions.sum(cast(objects.real, "int64"), 1))
    return where(most > x.shape[1], tensor(np.nan, x.dtype), total)


def _assignment_costs(
    x: Tensor, boxes: Tensor, objects: Objects, class_cost: float, box_cost: float, giou_cost: float
) -> Tensor:
    """Return the cost of matching each object with each prediction: ``[B, N + 1, Q]``."""
    batch, count = objects.labels.shape
    places = objects.labels.unsqueeze(-1).expand(batch, count, x.shape[1])
    called = gather(op.Softmax(x, axis=2).transpose(1, 2), 1, places)
    apart = reductions.sum(op.Abs(objects.boxes.unsqueeze(2) - boxes.unsqueeze(1)), -1)
    giou = pairs(objects.boxes, boxes, "cxcywh").giou
    return box_cost * apart - class_cost * called - giou_cost * giou


# --- anchors -------------------------------------------------------------------------------------------------


def retinanet_loss(
    logits: TensorLike,
    deltas: TensorLike,
    labels: TensorLike,
    target_boxes: TensorLike,
    image_size: Sequence[int] | None = None,
    strides: Sequence[int] = STRIDES,
    size: float = 4.0,
    scales: Sequence[float] = SCALES,
    ratios: Sequence[float] = RATIOS,
    positive: float = 0.5,
    negative: float = 0.4,
    alpha: float = 0.25,
    gamma: float = 2.0,
    beta: float = 1 / 9,
    box_weight: float = 1.0,
) -> Tensor:
    """The loss of RetinaNet: focal loss of anchors plus ``box_weight`` · smooth L1 of their boxes (Lin et al. 2017).

    For SSD use ``ssd_loss``.

    Each anchor is matched with the object of its greatest IoU if this IoU is at least ``positive``, or if no other
    anchor has a greater IoU with the object. It is background if its greatest IoU is below ``negative``; other anchors
    are ignored. In each image, both sums are divided by the number of matched anchors, or 1 if there are none; the loss
    is the mean over images (as in torchvision).

    Args:
        logits: ``[B, A, C]``, a logit (of a sigmoid) for each class.
        deltas: ``[B, A, 4]``: ``(x − xa)/wa``, ``(y − ya)/ha``, ``log(w/wa)``, ``log(h/ha)`` of the centre (x, y) and
            the sides (w, h) of the box relative to those of the anchor (xa, ya, wa, ha).
        labels, target_boxes: class indices ``[B, N]``, padded with −1, and boxes ``[B, N, 4]``.
        image_size, strides, size, scales, ratios: the arguments of ``gradgraph.vision.anchors``, which must return the
            anchors in the order of the model's outputs.
        positive, negative: the bounds of the IoU.
        alpha, gamma: the parameters of the focal loss.
        beta: the difference at which smooth L1 changes from quadratic to linear.
        box_weight: the factor of the smooth L1.
    """
    x, classes = _scores(logits, "retinanet")
    laid = anchors(checked_size("retinanet", image_size), strides, size, scales, ratios)
    _check_places(x, len(laid), "retinanet", "anchors")
    anchor = tensor(laid, x.dtype)
    objects = Objects.of(labels, target_boxes, -1, x.dtype)
    place, is_background = _answers(anchor, objects, positive, negative)
    met = objects.at(place)
    count = reductions.sum(cast(met.real, x.dtype), 1)
    is_class = cast(met.labels.unsqueeze(-1) == arange(classes), x.dtype)
    called = reductions.sum(sigmoid_focal_loss(x, is_class, alpha, gamma, "none"), -1)
    called = where(logical_or(met.real, is_background), called, 0.0)
    centre = (met.boxes[..., :2] - anchor[:, :2]) / anchor[:, 2:]
    sides = op.Log(where(met.real.unsqueeze(-1), met.boxes[..., 2:], anchor[:, 2:]) / anchor[:, 2:])
    placed = reductions.sum(smooth_l1_loss(wide(deltas), cat([centre, sides], -1), "none", beta), -1)
    losses = reductions.sum(called + box_weight * where(met.real, placed, 0.0), 1)
    return reductions.mean(losses / maximum(count, 1.0))


def _answers(anchor: Tensor, objects: Objects, positive: float, negative: float) -> tuple[Tensor, Tensor]:
    """Return the index ``[B, A]`` of the object matched with each anchor, or −1, and whether it is background."""
    iou = where(objects.real.unsqueeze(-1), pairs(objects.boxes, anchor, "cxcywh").iou, -1.0)
    iou = detach(iou)
    best, place = reductions.amax(iou, 1), op.ArgMax(iou, axis=1, keepdims=0)
    of_object = reductions.amax(iou, 2, keepdim=True)
    # anchors of one size around an object have the same IoU, up to rounding
    is_best = reductions.any(logical_and(iou >= of_object * (1.0 - 1e-5), of_object > 0.0), 1)
    return where(logical_or(best >= positive, is_best), place, -1), best < negative


def _check_places(
    x: Tensor, expected: int, name: str, what: str, options: str = "image_size, strides and further sizes"
) -> None:
    found = x.shape[1]
    if isinstance(found, int) and found != expected:
        raise BuildError(
            f"the options of {name} result in {expected} {what}, but the model has outputs for {found}; pass the "
            f"{options} that the model was made for"
        )


# --- priors --------------------------------------------------------------------------------------------------


def ssd_loss(
    logits: TensorLike,
    deltas: TensorLike,
    labels: TensorLike,
    target_boxes: TensorLike,
    priors: Sequence[Sequence[float]] | None = None,
    variances: Sequence[float] = (0.1, 0.2),
    positive: float = 0.5,
    negatives: float = 3.0,
    beta: float = 1.0,
    box_weight: float = 1.0,
) -> Tensor:
    """The loss of SSD: cross entropy of priors with hard negative mining, plus ``box_weight`` · smooth L1 of their
    boxes (Liu et al. 2016, arXiv:1512.02325).

    Each prior is matched with the object of its greatest IoU if this IoU is at least ``positive``; each object is also
    matched with its best prior. Of the other priors of an image, the priors with the greatest loss are trained as
    background, ``negatives`` for each matched prior. The sums are divided by the number of matched priors in the batch,
    or 1 if there are none (as in torchvision).

    Args:
        logits: scores ``[B, A, C + 1]`` of the A priors; class 0 is the background, so label 0 is scored by
            ``logits[..., 1]``.
        deltas: ``[B, A, 4]``: ``(x − xa)/wa/v₀``, ``(y − ya)/ha/v₀``, ``log(w/wa)/v₁``, ``log(h/ha)/v₁`` of the centre
            (x, y) and the sides (w, h) of the box relative to those of the prior (xa, ya, wa, ha).
        labels, target_boxes: class indices ``[B, N]``, padded with −1, and boxes ``[B, N, 4]``.
        priors: ``[A, 4]``, the model's prior boxes in the order of its outputs: centre x, centre y, width and height
            relative to the image.
        variances: v₀ of centres and v₁ of sides; ``(1, 1)`` if the model has none.
        positive: the minimum IoU of a matched prior.
        negatives: the number of background priors for each matched prior.
        beta: the difference at which smooth L1 changes from quadratic to linear.
        box_weight: the factor of the smooth L1.
    """
    x, _ = _scores(logits, "ssd")
    laid = checked_priors(priors)
    _check_places(x, len(laid), "ssd", "priors", "priors")
    prior = tensor(laid, x.dtype)
    objects = Objects.of(labels, target_boxes, -1, x.dtype)
    met = objects.at(_matched(prior, objects, positive))
    called = cross_entropy(x, where(met.real, met.labels + 1, 0), None, -100, "none", axis=2)
    hardness = detach(where(met.real, -1.0, called))
    rank = argsort(argsort(hardness, 1, descending=True), 1)
    most = reductions.sum(cast(met.real, x.dtype), 1, keepdim=True) * negatives
    counted = logical_or(met.real, cast(rank, x.dtype) < most)
    centre = (met.boxes[..., :2] - prior[:, :2]) / prior[:, 2:] / variances[0]
    sides = op.Log(where(met.real.unsqueeze(-1), met.boxes[..., 2:], prior[:, 2:]) / prior[:, 2:]) / variances[1]
    placed = reductions.sum(smooth_l1_loss(wide(deltas), cat([centre, sides], -1), "none", beta), -1)
    total = reductions.sum(where(counted, called, 0.0)) + box_weight * reductions.sum(where(met.real, placed, 0.0))
    return total / maximum(reductions.sum(cast(met.real, x.dtype)), 1.0)


def _matched(prior: Tensor, objects: Objects, positive: float) -> Tensor:
    """Return the index ``[B, A]`` of the object matched with each prior, or −1; each object gets its best prior."""
    iou = where(objects.real.unsqueeze(-1), pairs(objects.boxes, prior, "cxcywh").iou, -1.0)
    iou = detach(iou)
    best, place = reductions.amax(iou, 1), op.ArgMax(iou, axis=1, keepdims=0)
    of_object = op.ArgMax(iou, axis=2, keepdims=1)  # [B, N + 1, 1]
    is_own = logical_and(of_object == arange(iou.shape[2]), reductions.amax(iou, 2, keepdim=True) > 0.0)
    own = reductions.amax(where(is_own, arange(iou.shape[1]).unsqueeze(-1), -1), 1)
    return where(own >= 0, own, where(best >= positive, place, -1))


# --- points --------------------------------------------------------------------------------------------------


def fcos_loss(
    logits: TensorLike,
    distances: TensorLike,
    centerness: TensorLike,
    labels: TensorLike,
    target_boxes: TensorLike,
    image_size: Sequence[int] | None = None,
    strides: Sequence[int] = STRIDES,
    radius: float = 1.5,
    alpha: float = 0.25,
    gamma: float = 2.0,
    box_weight: float = 1.0,
) -> Tensor:
    """The loss of FCOS: focal loss of points, plus ``box_weight`` · (1 − GIoU) of their boxes, plus cross entropy of
    their centerness (Tian et al. 2019; as in torchvision).

    A point is matched with an object if it is inside the object's box, less than ``radius`` strides from its centre,
    and its farthest side is between 4 and 8 strides away (the finest map also covers nearer sides, the coarsest map
    farther ones). If several objects qualify, the smallest is matched. All three terms are sums, divided by the number
    of matched points, or 1 if there are none.

    Args:
        logits: ``[B, P, C]``, a logit (of a sigmoid) for each class.
        distances: ``[B, P, 4]``, in strides, from the point to the left, top, right and bottom side of its box. They
            must not be negative, so the model should end in Relu, Exp or Softplus.
        centerness: ``[B, P, 1]``, the logit of ``√(min(l, r)/max(l, r) · min(t, b)/max(t, b))`` with the distances l,
            t, r and b.
        labels, target_boxes: class indices ``[B, N]``, padded with −1, and boxes ``[B, N, 4]``.
        image_size, strides: the arguments of ``gradgraph.vision.points``, which must return the points in the order of
            the model's outputs.
        radius: the maximum distance from the centre of the object, in strides.
        alpha, gamma: the parameters of the focal loss.
        box_weight: the factor of the term of boxes.
    """
    x, classes = _scores(logits, "fcos")
    height, width = checked_size("fcos", image_size)
    laid = points((height, width), strides)
    _check_places(x, len(laid), "fcos", "points")
    scale = tensor(np.array([width, height, width, height], np.float32), x.dtype)
    objects = Objects.of(labels, target_boxes, -1, x.dtype)
    objects = objects._replace(boxes=box_convert(objects.boxes * scale, "cxcywh", "xyxy"))
    met = objects.at(_nearest(laid, objects, radius, x.dtype))
    px, py, stride = (tensor(laid[:, i], x.dtype) for i in range(3))
    there = cast(met.real, x.dtype)
    is_class = cast(met.labels.unsqueeze(-1) == arange(classes), x.dtype)
    called = reductions.sum(sigmoid_focal_loss(x, is_class, alpha, gamma, "none"))
    left, top, right, bottom = (wide(distances)[..., i] * stride for i in range(4))
    truth = corners(met.boxes)
    giou = overlap((px - left, py - top, px + right, py + bottom), truth).giou
    placed = reductions.sum(where(met.real, 1.0 - giou, 0.0))
    sides = [where(met.real, d, 1.0) for d in (px - truth[0], py - truth[1], truth[2] - px, truth[3] - py)]
    across, along = (minimum(sides[i], sides[i + 2]) / maximum(sides[i], sides[i + 2]) for i in (0, 1))
    logit = op.Reshape(wide(centerness), op.Shape(there))
    centred = binary_cross_entropy_with_logits(logit, sqrt(across * along), None, "none")
    centred = reductions.sum(where(met.real, centred, 0.0))
    return (called + box_weight * placed + centred) / maximum(reductions.sum(there), 1.0)


def _nearest(laid: np.ndarray[Any, Any], objects: Objects, radius: float, dtype: ir.DataType) -> Tensor:
    """Return the index ``[B, P]`` of the smallest object that each point in ``laid`` (x, y, stride) matches, or −1."""
    px, py, stride = (tensor(laid[:, i], dtype) for i in range(3))
    near, far = 4 * laid[:, 2], 8 * laid[:, 2]
    near = np.where(laid[:, 2] == laid[:, 2].min(), 0.0, near)
    far = np.where(laid[:, 2] == laid[:, 2].max(), np.inf, far)
    left, top, right, bottom = (side.unsqueeze(-1) for side in corners(objects.boxes))  # [B, N + 1, 1]
    sides = stack([px - left, py - top, right - px, bottom - py], -1)
    off = maximum(op.Abs(px - (left + right) / 2), op.Abs(py - (top + bottom) / 2))
    farthest = reductions.amax(sides, -1)
    fits = logical_and(reductions.amin(sides, -1) > 0.0, off < radius * stride)
    fits = logical_and(fits, logical_and(farthest > tensor(near, dtype), farthest < tensor(far, dtype)))
    fits = logical_and(fits, objects.real.unsqueeze(-1))
    area = where(fits, (right - left) * (bottom - top), tensor(np.inf, dtype))
    return where(reductions.any(fits, 1), op.ArgMin(detach(area), axis=1, keepdims=0), -1)


# --- names ---------------------------------------------------------------------------------------------------


def _targets(spare: int) -> tuple[Target, ...]:
    """Return the targets ``labels`` and ``target_boxes``; ``spare`` classes, such as background, have no objects."""

    def labels(outputs: Sequence[Var]) -> Spec:
        shape = outputs[0].shape or (None,) * outputs[0].rank
        if len(shape) != 3:
            raise BuildError(
                "the first output of a detector must be scores of shape [images, predictions, classes], but has shape "
                f"{list(shape)}; name the outputs in the order of the loss"
            )
        classes = shape[2] - spare if isinstance(shape[2], int) else None
        return Spec(ir.DataType.INT64, (shape[0], "objects"), (0, None), classes, -1, padded=True)

    def boxes(outputs: Sequence[Var]) -> Spec:
        shape = outputs[0].shape or (None,)
        dtype = outputs[1].dtype  # float16 would round boxes by a third of a pixel of 640
        dtype = ir.DataType.FLOAT if dtype.bitwidth < 32 else dtype
        return Spec(dtype, (shape[0], "objects", 4), (0, None, None))

    return (
        Target("labels", "class indices (int64) `[B, N]`, −1 for none", labels),
        Target("target_boxes", "`[B, N, 4]`: centre, width, height relative to the image", boxes),
    )


def _check_bounds(arguments: Mapping[str, Any]) -> None:
    if not 0 <= arguments["negative"] <= arguments["positive"] <= 1:
        raise BuildError(
            f"negative is {arguments['negative']} and positive is {arguments['positive']}; use bounds of the IoU with "
            "0 ≤ negative ≤ positive ≤ 1"
        )


def _check_variances(arguments: Mapping[str, Any]) -> None:
    found = arguments["variances"]
    if np.shape(found) != (2,) or not all(0 < v < np.inf for v in found):
        raise BuildError(
            f"variances is {shown(found)}, but must be two numbers above zero, for centres and for sides; use (0.1, "
            "0.2)"
        )
    if arguments["priors"] is not None:
        checked_priors(arguments["priors"])


def _add(name: str, function: Callable[..., Tensor], options: str, reads: str, spare: int = 0, **more: Any) -> None:
    named(name, function, options, _targets(spare), reads=reads.split(), **more)


_TOO_MANY = {
    "nan": "check whether an image has more objects than the model predicts, and drop some; or lower the learning rate"
}
_add("detr", detr_loss, "no_object class_cost box_cost giou_cost class_weight box_weight giou_weight",
     "logits boxes", 1, activation="Softmax", remedies=_TOO_MANY)  # fmt: skip
_add("retinanet", retinanet_loss, "image_size strides size scales ratios positive negative alpha gamma beta box_weight",
     "logits deltas", activation="Sigmoid", check=_check_bounds)  # fmt: skip
_add("ssd", ssd_loss, "priors variances positive negatives beta box_weight", "logits deltas", 1, activation="Softmax",
     check=_check_variances)  # fmt: skip
_add("fcos", fcos_loss, "image_size strides radius alpha gamma box_weight", "logits distances centerness",
     activation="Sigmoid")  # fmt: skip

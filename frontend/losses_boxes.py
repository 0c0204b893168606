"""Box losses: one minus the overlap of predicted and true box, some with a term for boxes that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradgraph.errors import BuildError, shown
from gradgraph.frontend.boxes import EPS, FORMATS, Overlap, corners, overlap
from gradgraph.frontend.gradients import detach
from gradgraph.frontend.loss import named, reduced
from gradgraph.frontend.losses_values import pair
from gradgraph.frontend.pointwise import atan, square, where
from gradgraph.frontend.trace import TensorLike, op

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["box_iou_loss", "complete_box_iou_loss", "distance_box_iou_loss", "generalized_box_iou_loss"]

Corners = tuple["Tensor", ...]


def _met(boxes: TensorLike, target: TensorLike, fmt: str) -> tuple[Corners, Corners, Overlap]:
    x, t = pair(boxes, target)
    a, b = corners(x, fmt), corners(t, fmt)
    return a, b, overlap(a, b)


def box_iou_loss(boxes: TensorLike, target: TensorLike, fmt: str = "xyxy", reduction: str = "mean") -> Tensor:
    """``mean 1 − IoU`` of boxes ``[…, 4]``. Boxes that do not overlap get no gradient; use ``giou`` if there are any.

    Args:
        boxes, target: the predicted and the true boxes.
        fmt: the format of both: "xyxy" (left, top, right, bottom), "xywh" or "cxcywh".
        reduction: "mean" or "sum" of all boxes, or "none".
    """
    return reduced(1.0 - _met(boxes, target, fmt)[2].iou, reduction)


def generalized_box_iou_loss(
    boxes: TensorLike, target: TensorLike, fmt: str = "xyxy", reduction: str = "mean"
) -> Tensor:
    """``mean 1 − IoU + (hull − union)/hull`` of boxes ``[…, 4]`` (Rezatofighi et al. 2019).

    The hull is the smallest box around both boxes, so boxes that do not overlap get a gradient, too. ``fmt`` is
    "xyxy", as in torchvision, "xywh" or "cxcywh".
    """
    return reduced(1.0 - _met(boxes, target, fmt)[2].giou, reduction)


def distance_box_iou_loss(boxes: TensorLike, target: TensorLike, fmt: str = "xyxy", reduction: str = "mean") -> Tensor:
    """``mean 1 − IoU + d²/c²`` of boxes ``[…, 4]``, with the distance d of the centres and the diagonal c of the hull,
    the smallest box around both (Zheng et al. 2020). ``fmt`` is "xyxy", "xywh" or "cxcywh".
    """
    return reduced(_distance(*_met(boxes, target, fmt)), reduction)


def complete_box_iou_loss(boxes: TensorLike, target: TensorLike, fmt: str = "xyxy", reduction: str = "mean") -> Tensor:
    """``diou + α·v`` with ``v = 4/π²·(atan(w/h) − atan(w'/h'))²`` of the widths and heights of both boxes, and
    ``α = v/(1 − IoU + v)`` without a gradient (Zheng et al. 2020). ``fmt`` is "xyxy", "xywh" or "cxcywh".
    """
    a, b, met = _met(boxes, target, fmt)
    v = square(_slant(b) - _slant(a)) * (4 / math.pi**2)
    return reduced(_distance(a, b, met) + detach(v / (1.0 - met.iou + v + EPS)) * v, reduction)


def _distance(a: Corners, b: Corners, met: Overlap) -> Tensor:
    apart = [(a[i] + a[i + 2] - b[i] - b[i + 2]) / 2 for i in (0, 1)]
    return 1.0 - met.iou + (square(apart[0]) + square(apart[1])) / (square(met.sides[0]) + square(met.sides[1]) + EPS)


def _slant(box: Corners) -> Tensor:
    """Return atan(width / height) of boxes; EPS replaces a height near 0."""
    height = box[3] - box[1]
    return atan((box[2] - box[0]) / where(op.Abs(height) < EPS, EPS, height))


# --- names -----------------------------------------------------------------------------------------------


def check_format(arguments: Mapping[str, Any]) -> None:
    if arguments["fmt"] not in FORMATS:
        raise BuildError(f"box formats are {', '.join(FORMATS)}, not '{shown(arguments['fmt'])}'; set fmt")


for _name, _function in {
    "iou": box_iou_loss,
    "giou": generalized_box_iou_loss,
    "diou": distance_box_iou_loss,
    "ciou": complete_box_iou_loss,
}.items():
    named(_name, _function, "fmt reduction", check=check_format)

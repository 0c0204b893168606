"""Box formats and box overlap, with the formulas and names of ``torchvision.ops``.

A box is the last axis of a tensor, of length 4: ``xyxy`` (left, top, right, bottom), ``xywh`` (left, top, width,
height) or ``cxcywh`` (centre, width, height), in any unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import onnx_ir as ir

from gradgraph.errors import ModelError, shown
from gradgraph.frontend.activations import relu
from gradgraph.frontend.pointwise import cast, maximum, minimum, real
from gradgraph.frontend.shaping import stack, unbind
from gradgraph.frontend.trace import TensorLike, tensor

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["box_convert", "box_iou", "generalized_box_iou"]

FORMATS = ("xyxy", "xywh", "cxcywh")
EPS = 1e-7  # as in torchvision, for boxes without an area


class Overlap(NamedTuple):
    """Intersection, union and hull of pairs of boxes.

    Attributes:
        both: the area of the intersection.
        either: the area of the union.
        hull: the area of the hull, the smallest box around both boxes.
        sides: the width and height of the hull.
    """

    both: Tensor
    either: Tensor
    hull: Tensor
    sides: tuple[Tensor, Tensor]

    @property
    def iou(self) -> Tensor:
        return self.both / (self.either + EPS)

    @property
    def giou(self) -> Tensor:
        return self.iou - (self.hull - self.either) / (self.hull + EPS)


def wide(x: TensorLike) -> Tensor:
    """Return ``x``, cast to float32 unless its type is float32 or float64.

    Box areas in float16 would overflow at 65,504, the area of 256 × 256 pixels.
    """
    y = real(x)
    return cast(y, ir.DataType.FLOAT) if y.dtype.bitwidth < 32 else y


def corners(boxes: TensorLike, form: str = "xyxy") -> tuple[Tensor, ...]:
    """Return left, top, right and bottom, each ``[…]``, of boxes ``[…, 4]`` in the format ``form``."""
    x = wide(boxes)
    if form not in FORMATS:
        raise ModelError(f"box formats are {', '.join(FORMATS)}, not '{shown(form)}'")
    if not x.ndim or x.shape[-1] != 4:
        raise ModelError(f"boxes must have 4 numbers on the last axis, but got shape {list(x.shape)}")
    a, b, c, d = unbind(x, -1)
    if form == "xyxy":
        return a, b, c, d
    if form == "xywh":
        return a, b, a + c, b + d
    return a - c / 2, b - d / 2, a + c / 2, b + d / 2


def box_convert(boxes: TensorLike, in_fmt: str, out_fmt: str) -> Tensor:
    """Convert boxes ``[…, 4]`` to another format: ``xyxy``, ``xywh`` or ``cxcywh``."""
    if out_fmt not in FORMATS:
        raise ModelError(f"box formats are {', '.join(FORMATS)}, not '{shown(out_fmt)}'")
    if in_fmt == out_fmt:
        return tensor(boxes)
    left, top, right, bottom = corners(boxes, in_fmt)
    width, height = right - left, bottom - top
    return stack(
        {
            "xyxy": [left, top, right, bottom],
            "xywh": [left, top, width, height],
            "cxcywh": [left + width / 2, top + height / 2, width, height],
        }[out_fmt],
        -1,
    )


def overlap(a: Sequence[Tensor], b: Sequence[Tensor]) -> Overlap:
    """Return the overlap of boxes ``a`` and ``b``, each (left, top, right, bottom), which broadcast together."""
    width = relu(minimum(a[2], b[2]) - maximum(a[0], b[0]))
    height = relu(minimum(a[3], b[3]) - maximum(a[1], b[1]))
    both = width * height
    areas = [(x[2] - x[0]) * (x[3] - x[1]) for x in (a, b)]
    sides = maximum(a[2], b[2]) - minimum(a[0], b[0]), maximum(a[3], b[3]) - minimum(a[1], b[1])
    return Overlap(both, areas[0] + areas[1] - both, sides[0] * sides[1], sides)


def pairs(boxes1: TensorLike, boxes2: TensorLike, form: str = "xyxy") -> Overlap:
    """Return the overlap of every box ``[…, n, 4]`` with every box ``[…, m, 4]``: ``[…, n, m]``."""
    first = [x.unsqueeze(-1) for x in corners(boxes1, form)]
    return overlap(first, [x.unsqueeze(-2) for x in corners(boxes2, form)])


def box_iou(boxes1: TensorLike, boxes2: TensorLike, fmt: str = "xyxy") -> Tensor:
    """Intersection over union of every box ``[…, n, 4]`` with every box ``[…, m, 4]``: ``[…, n, m]``."""
    return pairs(boxes1, boxes2, fmt).iou


def generalized_box_iou(boxes1: TensorLike, boxes2: TensorLike, fmt: str = "xyxy") -> Tensor:
    """``IoU − (hull − union)/hull`` of every box ``[…, n, 4]`` with every box ``[…, m, 4]``: ``[…, n, m]``.

    The hull is the smallest box around both boxes, so the value decreases with their distance (Rezatofighi et al.
    2019).
    """
    return pairs(boxes1, boxes2, fmt).giou

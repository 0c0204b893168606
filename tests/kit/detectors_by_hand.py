"""Reference losses of boxes and detectors, written in torch with loops over pictures and scipy's assignment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from gradgraph.frontend.anchors import anchors, points

EPS = 1e-7


def corners(boxes: Any, fmt: str = "cxcywh") -> Any:
    if fmt == "xyxy":
        return boxes
    a, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat([a, a + size], -1) if fmt == "xywh" else torch.cat([a - size / 2, a + size / 2], -1)


def measures(a: Any, b: Any) -> tuple[Any, Any, Any]:
    """Return IoU, area of the union, and area of the hull of boxes given by corners, with broadcasting."""
    sides = F.relu(torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2]))
    both = sides.prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - both
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).prod(-1)
    return both / (union + EPS), union, hull


def iou_loss(x: Any, t: Any, fmt: str = "xyxy") -> Any:
    return (1 - measures(corners(x, fmt), corners(t, fmt))[0]).mean()


def giou(a: Any, b: Any) -> Any:
    iou, union, hull = measures(a, b)
    return iou - (hull - union) / (hull + EPS)


def giou_loss(x: Any, t: Any, fmt: str = "xyxy") -> Any:
    return (1 - giou(corners(x, fmt), corners(t, fmt))).mean()


def diou_each(a: Any, b: Any) -> Any:
    hull = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    apart = (a[..., :2] + a[..., 2:] - b[..., :2] - b[..., 2:]) / 2
    return 1 - measures(a, b)[0] + (apart**2).sum(-1) / ((hull**2).sum(-1) + EPS)


def diou_loss(x: Any, t: Any, fmt: str = "xyxy") -> Any:
    return diou_each(corners(x, fmt), corners(t, fmt)).mean()


def ciou_loss(x: Any, t: Any, fmt: str = "xyxy") -> Any:
    a, b = corners(x, fmt), corners(t, fmt)
    slant = [torch.atan((y[..., 2] - y[..., 0]) / (y[..., 3] - y[..., 1])) for y in (a, b)]
    v = 4 / torch.pi**2 * (slant[1] - slant[0]) ** 2
    with torch.no_grad():
        alpha = v / (1 - measures(a, b)[0] + v + EPS)
    return (diou_each(a, b) + alpha * v).mean()


def detr(logits: Any, boxes: Any, labels: Any, truth: Any, no_object: float = 0.1,
         costs: Sequence[float] = (1, 5, 2), weights: Sequence[float] = (1, 5, 2)) -> Any:  # fmt: skip
    """Compute DETR's loss as facebookresearch/detr does, on padded targets."""
    from scipy.optimize import linear_sum_assignment

    nothing = logits.shape[-1] - 1
    classes = torch.full(logits.shape[:2], nothing)
    l1, far, count = 0.0 * boxes.sum(), 0.0, max(1, int((labels >= 0).sum()))
    for i in range(len(logits)):
        real = labels[i] >= 0
        t, b = labels[i][real], truth[i][real]
        cost = (
            -costs[0] * logits[i].softmax(-1)[:, t]
            + costs[1] * torch.cdist(boxes[i], b, p=1)
            - costs[2] * giou(corners(boxes[i])[:, None], corners(b)[None])
        )
        queries, objects = linear_sum_assignment(cost.detach().numpy())
        classes[i, queries] = t[objects]
        l1 = l1 + (boxes[i][queries] - b[objects]).abs().sum()
        far = far + (1 - giou(corners(boxes[i][queries]), corners(b[objects]))).sum()
    share = torch.ones(nothing + 1, dtype=logits.dtype)
    share[nothing] = no_object
    named = F.cross_entropy(logits.transpose(1, 2), classes, share)
    return weights[0] * named + (weights[1] * l1 + weights[2] * far) / count


def focal(x: Any, t: Any, alpha: float = 0.25, gamma: float = 2.0) -> Any:
    p = torch.sigmoid(x)
    hard = (1 - (p * t + (1 - p) * (1 - t))) ** gamma
    return F.binary_cross_entropy_with_logits(x, t, reduction="none") * hard * (alpha * t + (1 - alpha) * (1 - t))


def retinanet(logits: Any, deltas: Any, labels: Any, truth: Any, beta: float = 1 / 9, **laid: Any) -> Any:
    """Compute RetinaNet's loss on padded targets, with torchvision's matching.

    Low-quality matches are allowed, but only with an overlap above 0.
    """
    anchor = torch.tensor(anchors(**laid), dtype=logits.dtype)
    total = 0.0 * deltas.sum()
    for i in range(len(logits)):
        real = labels[i] >= 0
        t, b = labels[i][real], truth[i][real]
        owner = torch.full((len(anchor),), -1)
        if len(b):
            iou = measures(corners(b)[:, None], corners(anchor)[None])[0]
            best, object_ = iou.max(0)
            owner = torch.where(best >= 0.5, object_, torch.where(best >= 0.4, -2, -1))
            of_object = iou.max(1, keepdim=True).values
            kept = ((iou >= of_object * (1 - 1e-5)) & (of_object > 0)).any(0)
            owner = torch.where(kept, object_, owner)
        hit, counted = owner >= 0, owner != -2
        is_class = torch.zeros_like(logits[i])
        if len(b):
            is_class[hit, t[owner[hit]]] = 1
        each = focal(logits[i], is_class)[counted].sum()
        if len(b):
            met, a = b[owner[hit]], anchor[hit]
            aims = torch.cat([(met[:, :2] - a[:, :2]) / a[:, 2:], torch.log(met[:, 2:] / a[:, 2:])], 1)
            each = each + F.smooth_l1_loss(deltas[i][hit], aims, reduction="sum", beta=beta)
        total = total + each / max(1, int(hit.sum()))
    return total / len(logits)


def ssd(logits: Any, deltas: Any, labels: Any, truth: Any, priors: Any, variances: Sequence[float] = (0.1, 0.2),
        negatives: float = 3.0) -> Any:  # fmt: skip
    """Compute SSD's loss as torchvision's SSD.compute_loss with SSDMatcher, on padded targets.

    Every box must overlap a prior.
    """
    laid = torch.tensor(priors, dtype=logits.dtype)
    named, placed, count = 0.0, 0.0 * deltas.sum(), 0
    for i in range(len(logits)):
        real = labels[i] >= 0
        t, b = labels[i][real], truth[i][real]
        owner = torch.full((len(laid),), -1)
        if len(b):
            iou = measures(corners(b)[:, None], corners(laid)[None])[0]
            best, owner = iou.max(0)
            owner[best < 0.5] = -1
            owner[iou.argmax(1)] = torch.arange(len(b))
        hit = owner >= 0
        classes = torch.zeros(len(laid), dtype=torch.int64)
        if len(b):
            classes[hit] = t[owner[hit]] + 1
            met, a = b[owner[hit]], laid[hit]
            aims = torch.cat([(met[:, :2] - a[:, :2]) / a[:, 2:] / variances[0],
                              torch.log(met[:, 2:] / a[:, 2:]) / variances[1]], 1)  # fmt: skip
            placed = placed + F.smooth_l1_loss(deltas[i][hit], aims, reduction="sum")
        each = F.cross_entropy(logits[i], classes, reduction="none")
        hard = torch.where(hit, -torch.inf, each.detach()).sort(descending=True).indices
        named = named + each[hit].sum() + each[hard[: int(negatives * int(hit.sum()))]].sum()
        count += int(hit.sum())
    return (placed + named) / max(1, count)


def fcos(logits: Any, distances: Any, centerness: Any, labels: Any, truth: Any, image_size: Sequence[int],
         strides: Sequence[int]) -> Any:  # fmt: skip
    """Compute FCOS' loss as torchvision does, on padded targets."""
    at = torch.tensor(points(image_size, strides), dtype=logits.dtype)
    centre, stride = at[:, :2], at[:, 2:]
    height, width = image_size
    near = torch.where(stride == min(strides), 0.0, 4 * stride)
    far = torch.where(stride == max(strides), torch.inf, 8 * stride)
    called, placed, centred, count = 0.0, 0.0 * distances.sum(), 0.0 * centerness.sum(), 0
    for i in range(len(logits)):
        real = labels[i] >= 0
        t, b = labels[i][real], corners(truth[i][real] * torch.tensor([width, height, width, height]))
        is_class = torch.zeros_like(logits[i])
        if len(b):
            sides = torch.cat([centre[:, None] - b[None, :, :2], b[None, :, 2:] - centre[:, None]], 2)
            fits = (sides.amin(2) > 0) & (sides.amax(2) > near) & (sides.amax(2) < far)
            fits &= (centre[:, None] - (b[:, :2] + b[:, 2:])[None] / 2).abs().amax(2) < 1.5 * stride
            area = torch.where(fits, (b[:, 2:] - b[:, :2]).prod(1)[None], torch.inf)
            hit, owner = fits.any(1), area.argmin(1)
            is_class[hit, t[owner[hit]]] = 1
            d, met = distances[i][hit] * stride[hit], b[owner[hit]]
            box = torch.cat([centre[hit] - d[:, :2], centre[hit] + d[:, 2:]], 1)
            placed = placed + (1 - giou(box, met)).sum()
            near_, far_ = centre[hit] - met[:, :2], met[:, 2:] - centre[hit]
            aim = (torch.minimum(near_, far_) / torch.maximum(near_, far_)).prod(1).sqrt()
            logit = centerness[i].flatten()[hit]
            centred = centred + F.binary_cross_entropy_with_logits(logit, aim, reduction="sum")
            count += int(hit.sum())
        called = called + focal(logits[i], is_class).sum()
    return (called + placed + centred) / max(1, count)


def drawn_boxes(seed: int, *shape: int) -> np.ndarray:
    """Return random boxes (centre, sides) inside the picture."""
    rng = np.random.default_rng(seed)
    sides = rng.uniform(0.1, 0.5, (*shape, 2))
    return np.concatenate([rng.uniform(sides / 2, 1 - sides / 2), sides], -1)

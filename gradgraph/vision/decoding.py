"""Decoding of detector outputs into objects, the inverse of the target encoding of the losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradgraph.data.annotations.annotated import Annotated
from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.classes import Classes
from gradgraph.errors import DataError, listed, shown
from gradgraph.frontend.anchors import anchors, checked_priors, points
from gradgraph.losses import LOSSES
from gradgraph.runtime.trainer import Trainer

MOST_GROWTH = np.log(1000 / 16)  # maximum log of box side / anchor side, as in torchvision
CANDIDATES = 1000  # per image, before non-maximum suppression


@dataclass(frozen=True)
class Detections:
    """Detected objects of an image, by descending score.

    Attributes:
        labels: class numbers ``[n]``.
        scores: ``[n]``, from 0 to 1.
        boxes: left, top, right, bottom ``[n, 4]``, in pixels of the image, or relative to an image of unknown size.
        classes: class names, in the order of their numbers; empty if there are none.
    """

    labels: Array
    scores: Array
    boxes: Array
    classes: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The class name of each object, or its number as text."""
        return Classes(self.classes).called(self.labels.tolist())


def nms(boxes: Array, scores: Array, overlap: float = 0.5) -> Array:
    """Return the indices of the boxes kept by non-maximum suppression, by descending score: int64 ``[k]``.

    Args:
        boxes: left, top, right, bottom ``[n, 4]``.
        scores: ``[n]``.
        overlap: IoU threshold from 0 to 1.
    """
    order = np.argsort(-scores, kind="stable")
    kept: list[int] = []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(int(best))
        order = order[iou(boxes[best][None], boxes[order])[0] <= overlap]
    return np.array(kept, np.int64)


def iou(a: Array, b: Array, crowd: Array | None = None) -> Array:
    """Compute the IoU ``[n, m]`` of boxes ``a [n, 4]`` and ``b [m, 4]`` (left, top, right, bottom).

    For boxes of ``b`` that are crowds (bool ``crowd [m]``), the union is replaced by the area of ``a``.
    """
    sides = np.minimum(a[:, None, 2:], b[None, :, 2:]) - np.maximum(a[:, None, :2], b[None, :, :2])
    both = np.prod(np.maximum(sides, 0), axis=2)
    areas = [np.prod(np.maximum(x[:, 2:] - x[:, :2], 0), axis=1) for x in (a, b)]
    below = areas[0][:, None] + areas[1][None] - both
    if crowd is not None:
        below = np.where(crowd[None], areas[0][:, None], below)
    found: Array = both / np.where(below > 0, below, 1)
    return found


# --- by loss ---------------------------------------------------------------------------------------------------


def _sigmoid(x: Array) -> Array:
    y: Array = 1 / (1 + np.exp(-np.clip(x, -60, 60)))
    return y


def _softmax(x: Array) -> Array:
    high = np.exp(x - x.max(-1, keepdims=True))
    y: Array = high / high.sum(-1, keepdims=True)
    return y


def _corners(cxcywh: Array) -> Array:
    return np.concatenate([cxcywh[..., :2] - cxcywh[..., 2:] / 2, cxcywh[..., :2] + cxcywh[..., 2:] / 2], -1)


def _of_detr(outputs: Sequence[Array], arguments: Mapping[str, Any]) -> tuple[Array, Array]:
    return _softmax(outputs[0])[..., :-1], _corners(outputs[1])


def _of_retinanet(outputs: Sequence[Array], arguments: Mapping[str, Any]) -> tuple[Array, Array]:
    laid = anchors(*(arguments[name] for name in ("image_size", "strides", "size", "scales", "ratios")))
    centres = laid[:, :2] + outputs[1][..., :2] * laid[:, 2:]
    sides = laid[:, 2:] * np.exp(np.minimum(outputs[1][..., 2:], MOST_GROWTH))
    return _sigmoid(outputs[0]), _corners(np.concatenate([centres, sides], -1))


def _of_ssd(outputs: Sequence[Array], arguments: Mapping[str, Any]) -> tuple[Array, Array]:
    laid, (of_centre, of_sides) = checked_priors(arguments["priors"]), arguments["variances"]
    centres = laid[:, :2] + outputs[1][..., :2] * of_centre * laid[:, 2:]
    sides = laid[:, 2:] * np.exp(np.minimum(outputs[1][..., 2:] * of_sides, MOST_GROWTH))
    return _softmax(outputs[0])[..., 1:], _corners(np.concatenate([centres, sides], -1))


def _of_fcos(outputs: Sequence[Array], arguments: Mapping[str, Any]) -> tuple[Array, Array]:
    height, width = arguments["image_size"]
    laid = points((height, width), arguments["strides"])
    apart = outputs[1] * laid[:, 2:]
    boxes = np.concatenate([laid[:, :2] - apart[..., :2], laid[:, :2] + apart[..., 2:]], -1)
    centred = _sigmoid(outputs[2].reshape(*outputs[0].shape[:2], 1))
    return np.sqrt(_sigmoid(outputs[0]) * centred), boxes / [width, height, width, height]


DECODERS: dict[str, Callable[[Sequence[Array], Mapping[str, Any]], tuple[Array, Array]]] = {
    "detr": _of_detr, "retinanet": _of_retinanet, "ssd": _of_ssd, "fcos": _of_fcos,
}  # fmt: skip


def detections(
    loss: str, outputs: Sequence[Array], score: float = 0.05, overlap: float = 0.5, most: int = 100, **arguments: Any
) -> list[Detections]:
    """Decode the outputs of a detector trained with a named loss into the objects of each image, with relative boxes.

    Args:
        loss: "detr", "retinanet", "ssd" or "fcos".
        outputs: the outputs that the loss reads, in its order.
        score: score threshold.
        overlap: IoU threshold of non-maximum suppression per class. Unused for "detr".
        most: maximum number of objects per image.
        arguments: arguments of the loss, such as ``image_size``.

    Raises:
        DataError: the loss has no decoder, or reads another number of outputs or other shapes.
    """
    if loss not in DECODERS:
        raise DataError(f"the loss '{shown(loss)}' has no decoder; choose from {listed(DECODERS)}")
    made = LOSSES.by_name(loss, **arguments)
    shapes = [np.shape(x) for x in outputs]
    same = len({shape[:2] for shape in shapes}) == 1 and all(len(shape) == 3 for shape in shapes)
    if len(outputs) != len(made.reads) or not same or shapes[1][2] != 4:
        raise DataError(
            f"the loss {loss} reads {listed(made.reads)}, each [images, predictions, …] and boxes with 4 "
            f"numbers, but the outputs have the shapes {listed([str(list(shape)) for shape in shapes])}; pass the "
            "outputs that it reads, in this order"
        )
    scores, boxes = DECODERS[loss]([np.asarray(x, np.float64) for x in outputs], made.arguments)
    boxes = np.clip(boxes, 0, 1)
    each = loss != "detr"
    return [_chosen(s, b, score, overlap if each else None, most) for s, b in zip(scores, boxes, strict=True)]


def _chosen(scores: Array, boxes: Array, least: float, overlap: float | None, most: int) -> Detections:
    if overlap is None:  # one class per prediction
        labels, places = scores.argmax(1), np.arange(len(scores))
        sure = scores.max(1)
        kept = np.flatnonzero(sure >= least)
        places, labels, sure = places[kept], labels[kept], sure[kept]
    else:
        places, labels = np.nonzero(scores >= least)
        sure = scores[places, labels]
        first = np.argsort(-sure, kind="stable")[:CANDIDATES]
        places, labels, sure = places[first], labels[first], sure[first]
        apart = boxes[places] + 2.0 * labels[:, None]  # boxes of different classes do not overlap
        kept = nms(apart, sure, overlap)
        places, labels, sure = places[kept], labels[kept], sure[kept]
    order = np.argsort(-sure, kind="stable")[:most]
    return Detections(labels[order], sure[order], boxes[places[order]])


def detect(
    trainer: Trainer,
    pictures: Annotated,
    outputs: Sequence[str] | None = None,
    *,
    batch_size: int | None = None,
    averaged: bool = True,
    score: float = 0.05,
    overlap: float = 0.5,
    most: int = 100,
) -> list[Detections]:
    """Detect the objects in each of these images, with boxes in pixels of the image.

    Args:
        trainer: a trainer of a step with the loss "detr", "retinanet", "ssd" or "fcos".
        pictures: images, as read by :func:`gradgraph.vision.coco`.
        outputs: the outputs that the loss reads, in its order; by default the model's first ones.
        batch_size: images per run; 32 by default.
        averaged: as for ``Trainer.evaluate``.
        score, overlap, most: as for :func:`gradgraph.vision.detections`.

    Raises:
        DataError: the step has a different loss, or an output does not exist or does not fit the loss.
    """
    loss = trainer.manifest.loss
    if loss.get("name") not in DECODERS:
        raise DataError(f"the loss '{shown(loss.get('name'))}' has no decoder; choose from {listed(DECODERS)}")
    form = pictures.form_for(trainer.manifest.inputs, trainer.names)
    classes = pictures.classes_of(trainer.manifest.targets, trainer.names).names
    found: list[Detections] = []
    for given in trainer.predict(pictures, batch_size, averaged=averaged, per_batch=True):
        named = given if isinstance(given, Mapping) else {"": given}
        names = outputs or list(named)[: len(LOSSES.by_name(loss["name"], **loss["arguments"]).reads)]
        if missing := [name for name in names if name not in named]:
            raise DataError(f"the model has no output {listed(missing)}; it has {listed(named)}")
        arguments = dict(loss["arguments"])
        for one in detections(loss["name"], [named[n] for n in names], score, overlap, most, **arguments):
            found.append(replace(one, boxes=pictures.in_picture(len(found), one.boxes, form), classes=classes))
    return found

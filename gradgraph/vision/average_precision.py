"""COCO's average precision of detections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradgraph.data.annotations.annotated import Annotated, Truth
from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.classes import Classes
from gradgraph.errors import DataError
from gradgraph.runtime.trainer import Trainer
from gradgraph.vision.decoding import Detections, detect, iou

OVERLAPS = tuple(np.linspace(0.5, 0.95, 10))
RECALLS = np.linspace(0, 1, 101)


def mean_average_precision(
    found: Sequence[Detections],
    pictures: Annotated | Sequence[Truth],
    overlaps: Sequence[float] = OVERLAPS,
    most: int = 100,
) -> dict[str, Any]:
    """Compute COCO's average precision: over classes and IoUs from 0.5 to 0.95, at 101 recalls.

    Args:
        found: the detections of each image.
        pictures: the annotated images, in the same order. Classes are matched by name if both have names.
        overlaps: the IoU thresholds.
        most: maximum number of detections per image and class, by score.

    Returns:
        ``"ap"``, the mean over ``overlaps``; ``"ap50"`` and ``"ap75"``, if these are among them; and ``"per_class"``,
        the AP of each class by name (or number, without names). NaN for classes without objects.

    Raises:
        UnmatchedError: the images have a class that the model does not have.
        DataError: the number of images differs from that of detections.
    """
    if len(found) != len(pictures):
        raise DataError(
            f"there are detections of {len(found)} images, but {len(pictures)} images are passed; pass the same images"
        )
    known = Classes(next((one.classes for one in found if one.classes), ()))
    if isinstance(pictures, Annotated):
        truths = pictures.truths()
        if known.names:  # detections have the model's class numbers, which may differ from those of the file
            places = known.of_names(pictures.classes, pictures.where)
            truths = [truth._replace(labels=places[truth.labels]) for truth in truths]
        else:
            known = Classes(tuple(pictures.classes))
    else:
        truths = list(pictures)
    names = known.names
    numbers = sorted({int(n) for t in truths for n in t.labels} | set(range(len(names))))
    table = np.array([_of_class(found, truths, number, overlaps, most) for number in numbers])
    table = table.reshape(len(numbers), len(overlaps))
    means = {"ap": _mean(table)}
    for key, overlap in (("ap50", 0.5), ("ap75", 0.75)):
        at = [i for i, o in enumerate(overlaps) if abs(o - overlap) < 1e-9]
        means |= {key: _mean(table[:, at])} if at else {}
    called: dict[int, Any] = {n: names[n] if n < len(names) else n for n in numbers}
    return {**means, "per_class": {called[n]: _mean(row) for n, row in zip(numbers, table, strict=True)}}


def evaluate(
    trainer: Trainer,
    pictures: Annotated,
    outputs: Sequence[str] | None = None,
    *,
    batch_size: int | None = None,
    averaged: bool = True,
) -> dict[str, Any]:
    """Compute COCO's average precision of a detector on these images.

    Args:
        trainer, pictures, outputs, batch_size, averaged: as for :func:`gradgraph.vision.detect`.

    Returns:
        The result of :func:`mean_average_precision`.

    Raises:
        UnmatchedError: the images have a class that the model does not have.
        DataError: as for :func:`gradgraph.vision.detect`.
    """
    found = detect(trainer, pictures, outputs, batch_size=batch_size, averaged=averaged)
    return mean_average_precision(found, pictures)


def _mean(table: Array) -> float:
    known = table[~np.isnan(table)]
    return float(known.mean()) if known.size else float("nan")


def _of_class(
    found: Sequence[Detections], truths: Sequence[Truth], number: int, overlaps: Sequence[float], most: int
) -> list[float]:
    """Return the average precision of a class at each IoU threshold."""
    scores, hits, ignored, objects = [], [], [], 0
    for one, truth in zip(found, truths, strict=True):
        mine = np.flatnonzero(one.labels == number)
        mine = mine[np.argsort(-one.scores[mine], kind="stable")][:most]
        theirs = np.flatnonzero(truth.labels == number)
        theirs = theirs[np.argsort(truth.crowd[theirs], kind="stable")]  # crowds come last
        crowd = truth.crowd[theirs].astype(bool)
        objects += int((~crowd).sum())
        overlap = iou(one.boxes[mine], truth.boxes[theirs], crowd)
        matched = [_matched(overlap, crowd, least) for least in overlaps]
        scores.append(one.scores[mine])
        hits.append(np.array([h for h, _ in matched]).reshape(len(overlaps), -1))
        ignored.append(np.array([i for _, i in matched]).reshape(len(overlaps), -1))
    if not objects:
        return [float("nan")] * len(overlaps)
    order = np.argsort(-np.concatenate(scores), kind="stable")
    hit, out = (np.concatenate(parts, 1)[:, order] for parts in (hits, ignored))
    return [_area(h[~o], objects) for h, o in zip(hit, out, strict=True)]


def _matched(overlap: Array, crowd: Array, least: float) -> tuple[Array, Array]:
    """Return whether each detection matches an object, and whether it matches a crowd: bool [detections] each.

    An object matches at most one detection; a crowd matches any number. ``overlap`` is the IoU, [detections, objects],
    of detections by descending score; ``crowd`` marks crowds; ``least`` is the threshold.
    """
    hits, ignored = np.zeros(len(overlap), bool), np.zeros(len(overlap), bool)
    free = np.ones(overlap.shape[1], bool)
    for i, row in enumerate(overlap):
        for kind, result in ((~crowd, hits), (crowd, ignored)):
            open_ = np.where(kind & (free | crowd), row, -1.0)
            if open_.size and open_.max() >= min(least, 1 - 1e-10):
                # of several equal overlaps, pycocotools picks the last
                free[len(open_) - 1 - int(np.argmax(open_[::-1]))] = False
                result[i] = True
                break
    return hits, ignored


def _area(hits: Array, objects: int) -> float:
    """Return the average precision of a class: the mean over ``RECALLS`` of the best precision at that recall or more.

    ``hits`` marks detections, by descending score, that match one of ``objects`` objects.
    """
    found = np.cumsum(hits)
    precision = found / np.arange(1, len(hits) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    places = np.searchsorted(found / objects, RECALLS, side="left")
    return float(np.where(places < len(best), np.append(best, 0.0)[np.minimum(places, len(best))], 0.0).mean())

"""Average precision against a slow reading of its definition and pycocotools; objects made of what detectors give."""

from __future__ import annotations

import contextlib
import io
import math
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.errors import DataError
from gradgraph.vision import Detections, Truth
from gradgraph.vision.decoding import iou

CLASSES = 3


def drawn(seed: int, crowds: bool = True) -> tuple[list[Detections], list[Truth]]:
    """Objects of some pictures, and detections near them and elsewhere; scores have ties."""
    rng = np.random.default_rng(seed)
    found, truths = [], []
    for _ in range(6):
        count = int(rng.integers(0, 6))
        corner, side = rng.uniform(-20, 60, (count, 2)), rng.uniform(10, 40, (count, 2))  # outside of the picture, too
        boxes = np.concatenate([corner, corner + side], 1)
        labels = rng.integers(0, CLASSES, count)
        truths.append(Truth(labels, boxes, rng.random(count) < (0.2 if crowds else 0)))
        near = np.repeat(boxes, 2, 0) + np.clip(rng.normal(0, 3, (2 * count, 4)), -4, 4)
        corner, side = rng.uniform(0, 60, (3, 2)), rng.uniform(5, 30, (3, 2))
        near = np.concatenate([near, np.concatenate([corner, corner + side], 1)])
        called = np.concatenate([np.repeat(labels, 2), rng.integers(0, CLASSES, 3)])
        scores = np.round(rng.random(len(near)), 1)
        found.append(Detections(called, scores, near))
    return found, truths


def slowly(found: list[Detections], truths: list[Truth], overlap: float) -> dict[int, float]:
    """The average precision of each class, as Lin et al. 2014 and pycocotools define it, one detection at a time."""
    result = {}
    for number in range(CLASSES):
        rows: list[tuple[float, str]] = []
        objects = 0
        for one, truth in zip(found, truths, strict=True):
            theirs = [k for k in range(len(truth.labels)) if truth.labels[k] == number]
            objects += sum(not truth.crowd[k] for k in theirs)
            free = set(theirs)
            mine = [k for k in range(len(one.labels)) if one.labels[k] == number]
            for k in sorted(mine, key=lambda k: -one.scores[k]):
                best, said = -1.0, "wrong"
                for t in theirs:
                    if truth.crowd[t] or t not in free:
                        continue
                    value = area_share(one.boxes[k], truth.boxes[t], False)
                    if value >= overlap and value >= best:
                        best, said, chosen = value, "right", t
                if said == "right":
                    free.discard(chosen)
                elif any(truth.crowd[t] and area_share(one.boxes[k], truth.boxes[t], True) >= overlap for t in theirs):
                    said = "ignored"
                rows.append((one.scores[k], said))
        rows = [row for row in sorted(rows, key=lambda row: -row[0]) if row[1] != "ignored"]
        recall, precision, hits = [], [], 0
        for n, (_, said) in enumerate(rows, 1):
            hits += said == "right"
            recall.append(hits / max(objects, 1))
            precision.append(hits / n)
        points = []
        for r in np.linspace(0, 1, 101):
            points.append(max((p for p, q in zip(precision, recall, strict=True) if q >= r), default=0.0))
        result[number] = float(np.mean(points)) if objects else math.nan
    return result


def area_share(a: np.ndarray, b: np.ndarray, crowd: bool) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0.0) * max(height, 0.0)
    first, second = ((x[2] - x[0]) * (x[3] - x[1]) for x in (a, b))
    return float(both / (first if crowd else first + second - both))


@pytest.mark.parametrize("overlap", [0.5, 0.75, 0.95])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_what_the_definition_says(seed: int, overlap: float) -> None:
    found, truths = drawn(seed)
    measured = gg.vision.mean_average_precision(found, truths, [overlap])
    expected = slowly(found, truths, overlap)
    for number, value in expected.items():
        assert measured["per_class"].get(number, math.nan) == pytest.approx(value, abs=1e-12, nan_ok=True)
    known = [v for v in expected.values() if not math.isnan(v)]
    assert measured["ap"] == pytest.approx(np.mean(known), abs=1e-12)
    assert measured["ap"] < 1 or seed < 0


@pytest.mark.parametrize("crowds", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_what_pycocotools_says(seed: int, crowds: bool) -> None:
    coco = pytest.importorskip("pycocotools.coco", reason="compares with pycocotools")
    from pycocotools.cocoeval import COCOeval

    found, truths = drawn(seed, crowds)
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = coco.COCO()
        theirs.dataset = {
            "images": [{"id": i + 1} for i in range(len(truths))],
            "categories": [{"id": c} for c in range(CLASSES)],
            "annotations": [
                {"id": 100 * i + k + 1, "image_id": i + 1, "category_id": int(t.labels[k]), "bbox": xywh(t.boxes[k]),
                 "area": 5000.0, "iscrowd": int(t.crowd[k])}
                for i, t in enumerate(truths)
                for k in range(len(t.labels))
            ],
        }  # fmt: skip
        theirs.createIndex()
        rows: list[dict[str, Any]] = [
            {"image_id": i + 1, "category_id": int(d.labels[k]), "bbox": xywh(d.boxes[k]), "score": float(d.scores[k])}
            for i, d in enumerate(found)
            for k in range(len(d.labels))
        ]
        evaluation = COCOeval(theirs, theirs.loadRes(rows), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    mine = gg.vision.mean_average_precision(found, truths)
    np.testing.assert_allclose([mine["ap"], mine["ap50"], mine["ap75"]], evaluation.stats[:3], atol=1e-9)


def xywh(box: np.ndarray) -> list[float]:
    return [float(x) for x in (box[0], box[1], box[2] - box[0], box[3] - box[1])]


def test_nothing_found_and_nothing_there() -> None:
    none = Detections(np.zeros(0, int), np.zeros(0), np.zeros((0, 4)))
    one = Truth(np.array([1]), np.array([[0.0, 0.0, 2.0, 2.0]]), np.array([False]))
    assert gg.vision.mean_average_precision([none], [one])["ap"] == 0.0
    empty = Truth(np.zeros(0, int), np.zeros((0, 4)), np.zeros(0, bool))
    assert math.isnan(gg.vision.mean_average_precision([none], [empty])["ap"])
    right = Detections(np.array([1]), np.array([0.3]), one.boxes)
    assert gg.vision.mean_average_precision([right], [one]) == {"ap": 1, "ap50": 1, "ap75": 1, "per_class": {1: 1}}
    with pytest.raises(DataError, match="detections of 1 images, but 2 images"):
        gg.vision.mean_average_precision([none], [one, one])


# --- what a model gives ------------------------------------------------------------------------------------


def test_of_boxes_that_overlap_the_surest_is_kept() -> None:
    boxes = np.array([[0, 0, 10, 10], [1, 0, 11, 10], [20, 0, 30, 10], [2, 0, 12, 10]], float)
    scores = np.array([0.5, 0.9, 0.1, 0.8])
    np.testing.assert_array_equal(gg.vision.nms(boxes, scores), [1, 2])
    np.testing.assert_array_equal(gg.vision.nms(boxes, scores, 0.85), [1, 3, 0, 2])
    assert gg.vision.nms(boxes[:0], scores[:0]).shape == (0,)
    assert iou(boxes[:1], boxes[1:2])[0, 0] == pytest.approx(90 / 110)


TRUTH = Truth(np.array([2, 0]), np.array([[0.25, 0.25, 0.5, 0.5], [0.5, 0.5, 1.0, 1.0]]), np.zeros(2, bool))
LAID = {"image_size": (64, 64), "strides": (8, 16)}


def centred(boxes: np.ndarray) -> np.ndarray:
    return np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], 1)


def perfect(loss: str) -> list[np.ndarray]:
    """Outputs for TRUTH: the scores of the right class are high where a prediction lies on an object."""
    boxes = centred(TRUTH.boxes)
    if loss == "detr":
        logits = np.full((1, 4, 4), -9.0)
        logits[0, :, 3] = 9
        logits[0, [1, 3], TRUTH.labels] = 20
        placed = np.full((1, 4, 4), 0.5)
        placed[0, [1, 3]] = boxes
        return [logits, placed]
    if loss == "retinanet":
        laid = gg.vision.anchors(**LAID)
        logits, deltas = np.full((1, len(laid), 3), -9.0), np.zeros((1, len(laid), 4))
        for label, box in zip(TRUTH.labels, boxes, strict=True):
            at = np.argsort(np.abs(laid - box).sum(1))[:2]  # two for each
            logits[0, at, label] = [9, 8]
            deltas[0, at] = np.concatenate([(box[:2] - laid[at, :2]) / laid[at, 2:], np.log(box[2:] / laid[at, 2:])], 1)
        return [logits, deltas]
    if loss == "ssd":
        laid = gg.vision.anchors(**LAID)
        logits, deltas = np.tile([9.0, 0, 0, 0], (1, len(laid), 1)), np.zeros((1, len(laid), 4))
        for label, box in zip(TRUTH.labels, boxes, strict=True):
            at = np.argsort(np.abs(laid - box).sum(1))[:2]  # two for each
            logits[0, at, label + 1] = [19, 18]
            deltas[0, at, :2] = (box[:2] - laid[at, :2]) / laid[at, 2:] / 0.1
            deltas[0, at, 2:] = np.log(box[2:] / laid[at, 2:]) / 0.2
        return [logits, deltas]
    laid = gg.vision.points(**LAID)
    logits, apart = np.full((1, len(laid), 3), -9.0), np.zeros((1, len(laid), 4))
    for label, box in zip(TRUTH.labels, TRUTH.boxes * 64, strict=True):
        at = np.argsort(np.abs(laid[:, :2] - (box[:2] + box[2:]) / 2).sum(1))[:2]
        logits[0, at, label] = 9
        apart[0, at] = np.concatenate([laid[at, :2] - box[:2], box[2:] - laid[at, :2]], 1) / laid[at, 2:]
    return [logits, apart, np.full((1, len(laid), 1), 9.0)]


@pytest.mark.parametrize("loss", ["detr", "retinanet", "ssd", "fcos"])
def test_what_a_detector_gives_is_read_as_its_loss_means_it(loss: str) -> None:
    arguments = {} if loss == "detr" else {"priors": gg.vision.anchors(**LAID)} if loss == "ssd" else LAID
    (found,) = gg.vision.detections(loss, perfect(loss), score=0.5, **arguments)
    assert len(found.labels) == 2
    assert gg.vision.mean_average_precision([found], [TRUTH])["ap"] == pytest.approx(1.0)


def test_outputs_of_another_loss() -> None:
    with pytest.raises(DataError, match="the loss 'mse' has no decoder"):
        gg.vision.detections("mse", [])
    with pytest.raises(
        DataError,
        match=r"detr reads 'logits', 'boxes', each \[images, predictions, …\] and boxes with 4 numbers, but the",
    ):
        gg.vision.detections("detr", [np.zeros((1, 2, 3))])

"""Images with boxes, masks and polygons in the formats of COCO, YOLO and Pascal VOC; detections, and their metrics.

Boxes follow the augmentation of their image. The losses are in ``gradgraph.losses``.

This package imports the public API of training; only the command line imports it.
"""

from gradgraph.frontend.anchors import anchors, points
from gradgraph.vision.annotated import Annotated, Found, Truth
from gradgraph.vision.average_precision import evaluate, mean_average_precision
from gradgraph.vision.coco_files import coco
from gradgraph.vision.decoding import Detections, detect, detections, nms
from gradgraph.vision.mask_folders import MaskFolder, masks
from gradgraph.vision.reading import is_annotated, read
from gradgraph.vision.yolo_files import yolo

__all__ = [
    "Annotated",
    "Detections",
    "Found",
    "MaskFolder",
    "Truth",
    "anchors",
    "coco",
    "detect",
    "detections",
    "evaluate",
    "is_annotated",
    "masks",
    "mean_average_precision",
    "nms",
    "points",
    "read",
    "yolo",
]


def __dir__() -> list[str]:
    return sorted(__all__)

"""The public functions for annotated images: datasets with boxes, masks and polygons, detections and their metrics.

The datasets are in ``gradgraph.data.annotations``, the losses in ``gradgraph.losses``. Detections of a trained model
are decoded and measured here.
"""

from gradgraph.data.annotations.annotated import Annotated, Found, Truth
from gradgraph.data.annotations.coco_files import coco
from gradgraph.data.annotations.mask_folders import MaskFolder, masks
from gradgraph.data.annotations.reading import is_annotated, read
from gradgraph.data.annotations.yolo_files import yolo
from gradgraph.frontend.anchors import anchors, points
from gradgraph.vision.average_precision import evaluate, mean_average_precision
from gradgraph.vision.decoding import Detections, detect, detections, nms

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

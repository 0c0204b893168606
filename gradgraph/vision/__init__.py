"""Pictures with boxes, masks and outlines: data in the layouts of COCO, YOLO and Pascal VOC, what detectors find, and
how well. Boxes are read here and move with their picture; their losses are among ``gradgraph.losses``.

It imports the public faces of training; nothing imports it but the command line.
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

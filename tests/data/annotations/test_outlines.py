"""Outlines against pycocotools, and against their picture, wherever it is laid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.data.annotations.outlines import drawn
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.errors import DataError

pytest.importorskip("PIL", reason="pictures are read by Pillow")
from PIL import Image

PYCOCOTOOLS = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # it sets shapes as NumPy no longer likes


def polygon(rng: np.random.Generator, kind: str, width: int, height: int) -> np.ndarray:
    size, corners = np.array([width, height]), (int(rng.integers(3, 12)), 2)
    match kind:
        case "inside":
            return rng.random(corners) * size
        case "outside":
            return rng.random(corners) * 3 * size - size
        case "whole":
            return rng.integers(-5, size + 6, corners).astype(float)
        case "halves":
            return rng.integers(-5, 2 * size + 6, corners) / 2
    turns = np.sort(rng.random(corners[0])) * 2 * np.pi
    return size / 2 + np.stack([np.cos(turns), np.sin(turns)], 1) * size * rng.random((corners[0], 1))


@PYCOCOTOOLS
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kind", ["inside", "outside", "whole", "halves", "star"])
def test_polygons_are_drawn_as_pycocotools_draws_them(kind: str, parts: int) -> None:
    coco = pytest.importorskip("pycocotools.mask", reason="compares with pycocotools")
    rng = np.random.default_rng(parts)
    for _ in range(60):
        width, height = map(int, rng.integers(1, 70, 2))
        polygons = [polygon(rng, kind, width, height) for _ in range(parts)]
        packed = coco.merge(coco.frPyObjects([p.reshape(-1).tolist() for p in polygons], height, width))
        np.testing.assert_array_equal(drawn(polygons, (width, height)), coco.decode(packed) > 0)


def test_a_rectangle_has_its_area() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        (w, h), (x, y) = rng.integers(1, 30, 2), rng.integers(0, 30, 2)
        expected = np.zeros((64, 64), bool)
        expected[y : y + h, x : x + w] = True
        found = drawn([np.array([[x, y], [x + w, y], [x + w, y + h], [x, y + h]], float)], (64, 64))
        np.testing.assert_array_equal(found, expected)


def test_an_outline_longer_than_any_picture_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"an outline is 3,\d+,\d+,\d+ pixels long, more than 838,861; simplify or remove it"
    ):
        drawn([np.array([[0.0, 0.0], [1e9, 0.0], [0.0, 1e9]])], (8, 8))


# --- with their picture --------------------------------------------------------------------------------------------

SIDE = 60
SPECS = {
    "image": TensorSpec("image", "float32", ("b", 3, SIDE, SIDE)),
    "labels": TargetSpec("labels", "int64", ("b", "n"), ignore_index=-1),
    "boxes": TargetSpec("boxes", "float32", ("b", "n", 4)),
    "masks": TargetSpec("masks", "float32", ("b", "n", SIDE, SIDE)),
}


def white(folder: Path, size: tuple[int, int], kind: str) -> Path:
    """A white picture that one object fills, and more: as a polygon, run lengths, or a box alone."""
    (folder / "images").mkdir(parents=True)
    width, height = size
    Image.fromarray(np.full((height, width, 3), 255, np.uint8)).save(folder / "images" / "a.png")
    left, top, right, bottom = -5, -3, width + 4, height + 6
    outline: dict[str, Any] = {
        "polygon": [[left, top, right, top, right, bottom, left, bottom]],
        "runs": {"size": [height, width], "counts": [0, width * height]},
        "box": [],
    }
    one = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [left, top, right - left, bottom - top],
           "segmentation": outline[kind]}  # fmt: skip
    (folder / "annotations.json").write_text(json.dumps({
        "images": [{"id": 1, "file_name": "a.png", "width": width, "height": height}],
        "annotations": [one], "categories": [{"id": 1, "name": "all"}],
    }))  # fmt: skip
    return folder


@pytest.mark.parametrize("augment", [None, "zoom(factor=[1.3,2])", "zoom(factor=[0.5,0.9])", "flip(p=1)"])
@pytest.mark.parametrize("kind", ["polygon", "runs", "box"])
@pytest.mark.parametrize("size", [(60, 20), (21, 60), (33, 33)])
def test_objects_cover_their_picture_and_no_bar(
    size: tuple[int, int], kind: str, augment: str | None, tmp_path: Path
) -> None:
    """Boxes and masks are clipped to what is seen of the picture, in the middle of grey, too."""
    data = gg.vision.coco(white(tmp_path / "d", size, kind), augment=augment, letterbox=True)
    for epoch in range(3):
        (batch,) = data.load(iter([[0]]), SPECS, (0, epoch))
        seen = batch["image"][0].min(0) > 0.99
        np.testing.assert_array_equal(batch["masks"][0, 0] > 0, seen)
        rows, columns = np.nonzero(seen.any(1))[0], np.nonzero(seen.any(0))[0]
        (x, y, w, h) = batch["boxes"][0, 0] * SIDE
        found = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
        np.testing.assert_allclose(found, [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], atol=1e-4)


@PYCOCOTOOLS
def test_polygons_of_yolo_are_masks(tmp_path: Path) -> None:
    coco = pytest.importorskip("pycocotools.mask", reason="compares with pycocotools")
    for name in ("images", "labels"):
        (tmp_path / name).mkdir()
    Image.fromarray(np.zeros((SIDE, SIDE, 3), np.uint8)).save(tmp_path / "images" / "a.png")
    (tmp_path / "classes.txt").write_text("one")
    corners = np.array([[5.0, 6], [50, 11], [33, 52], [14, 40]])
    lines = ["0 " + " ".join(map(str, (corners / SIDE).reshape(-1))), "0 0.5 0.5 0.25 0.5"]
    (tmp_path / "labels" / "a.txt").write_text("\n".join(lines))
    (batch,) = gg.vision.yolo(tmp_path).load(iter([[0]]), SPECS, ())
    whole = [corners.reshape(-1).tolist(), [22.5, 15, 37.5, 15, 37.5, 45, 22.5, 45]]
    expected = coco.decode(coco.frPyObjects(whole, SIDE, SIDE)).transpose(2, 0, 1)
    assert (batch["masks"][0] != expected).sum() <= 2  # shares are rounded
    np.testing.assert_allclose(batch["boxes"][0, 0], [27.5 / 60, 29 / 60, 45 / 60, 46 / 60], atol=1e-6)

"""Pictures of drawn shapes, with their boxes, outlines and masks in common layouts of data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("circle", "square", "triangle")


def picture(rng: np.random.Generator, size: tuple[int, int], most: int) -> tuple[Image.Image, list[tuple[int, Any]]]:
    """Return a picture of size (width, height), and its shapes as pairs of class and corners of the outline."""
    image = Image.fromarray(rng.integers(0, 60, (size[1], size[0], 3), np.uint8))
    pen, shapes, taken = ImageDraw.Draw(image), list[tuple[int, Any]](), list[tuple[float, ...]]()
    for _ in range(rng.integers(1, most + 1)):
        side = rng.uniform(0.25, 0.45) * min(size)
        x, y = rng.uniform(0, size[0] - side), rng.uniform(0, size[1] - side)
        if any(x < c and a < x + side and y < d and b < y + side for a, b, c, d in taken):
            continue
        taken.append((x, y, x + side, y + side))
        kind = int(rng.integers(3))
        colour = tuple(int(c) for c in rng.integers(120, 256, 3))
        turns = np.linspace(0, 2 * np.pi, 40, endpoint=False)
        corners = {
            0: [(x + side / 2 * (1 + np.cos(a)), y + side / 2 * (1 + np.sin(a))) for a in turns],
            1: [(x, y), (x + side, y), (x + side, y + side), (x, y + side)],
            2: [(x + side / 2, y), (x + side, y + side), (x, y + side)],
        }[kind]
        pen.polygon([(float(a), float(b)) for a, b in corners], fill=colour)
        shapes.append((kind, np.array(corners)))
    return image, shapes


def coco(folder: Path, count: int, size: tuple[int, int] = (64, 64), most: int = 3, seed: int = 0) -> Path:
    """Write ``count`` pictures to ``folder/images``; return the path of their annotations."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    images, annotations = list[dict[str, Any]](), list[dict[str, Any]]()
    for i in range(count):
        image, shapes = picture(rng, size, most)
        name = f"{i:04}.png"
        image.save(folder / "images" / name)
        images.append({"id": 100 + i, "file_name": name, "width": size[0], "height": size[1]})
        for kind, corners in shapes:
            (left, top), (right, bottom) = corners.min(0), corners.max(0)
            annotations.append({
                "id": len(annotations) + 1, "image_id": 100 + i, "category_id": 10 * (kind + 1), "iscrowd": 0,
                "bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top),
                "segmentation": [corners.reshape(-1).tolist()],
            })  # fmt: skip
    categories = [{"id": 10 * (i + 1), "name": name} for i, name in enumerate(CLASSES)]
    path = folder / "annotations.json"
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return path


def masks(folder: Path, mode: str = "P") -> Path:
    """Write three pictures to ``folder/images``, and masks of the classes 0 to 2 and 255 to ``folder/masks``."""
    for name in ("images", "masks"):
        (folder / name).mkdir()
    rng = np.random.default_rng(0)
    for i in range(3):
        numbers = np.zeros((24, 48), np.uint8)
        numbers[6:18, 6 * i : 6 * i + 12] = i % 2 + 1
        numbers[0] = 255
        image = np.where(numbers[..., None] % 255, 250, 20) + rng.integers(0, 5, (24, 48, 3))
        Image.fromarray(image.astype(np.uint8)).save(folder / "images" / f"{i}.png")
        mask = Image.fromarray(numbers)
        if mode == "P":
            mask.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0] + [0] * 744 + [255, 255, 255])
        (mask if mode in ("P", "L") else mask.convert(mode)).save(folder / "masks" / f"{i}.png")
    return folder

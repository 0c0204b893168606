"""The same by hand in torch: what people write today, measured by the same average precision."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detector_network import CLASSES, SIZE, STRIDE, network
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from gradgraph.vision import Detections, Truth, mean_average_precision, nms


class Shapes(Dataset[Any]):
    def __init__(self, folder: Path, flips: bool) -> None:
        table = json.loads((folder / "annotations.json").read_text())
        numbers = {c["id"]: i for i, c in enumerate(sorted(table["categories"], key=lambda c: c["id"]))}
        self.rows = []
        for image in table["images"]:
            mine = [a for a in table["annotations"] if a["image_id"] == image["id"] and not a["iscrowd"]]
            boxes = np.array([a["bbox"] for a in mine], np.float32).reshape(-1, 4)
            boxes[:, 2:] += boxes[:, :2]
            labels = np.array([numbers[a["category_id"]] for a in mine], np.int64)
            self.rows.append((folder / "images" / image["file_name"], labels, boxes))
        self.flips = flips

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        path, labels, boxes = self.rows[i]
        pixels = np.asarray(Image.open(path).convert("RGB").resize((SIZE, SIZE)), np.float32) / 255
        if self.flips and torch.rand(()) < 0.5:
            pixels = pixels[:, ::-1].copy()
            boxes = np.stack([SIZE - boxes[:, 2], boxes[:, 1], SIZE - boxes[:, 0], boxes[:, 3]], 1)
        return torch.tensor(pixels).permute(2, 0, 1), torch.tensor(labels), torch.tensor(boxes)


def collate(samples: Any) -> Any:
    return torch.stack([s[0] for s in samples]), [s[1] for s in samples], [s[2] for s in samples]


def points() -> Any:
    at = torch.arange(SIZE // STRIDE) * STRIDE + STRIDE / 2
    y, x = torch.meshgrid(at, at, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], 1)


def focal(x: Any, t: Any, alpha: float = 0.25, gamma: float = 2.0) -> Any:
    p = torch.sigmoid(x)
    hard = (1 - (p * t + (1 - p) * (1 - t))) ** gamma
    return F.binary_cross_entropy_with_logits(x, t, reduction="none") * hard * (alpha * t + (1 - alpha) * (1 - t))


def giou(a: Any, b: Any) -> Any:
    both = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
    union = (a[:, 2:] - a[:, :2]).prod(1) + (b[:, 2:] - b[:, :2]).prod(1) - both
    hull = (torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])).prod(1)
    return both / (union + 1e-7) - (hull - union) / (hull + 1e-7)


def loss(outputs: Any, labels: Any, boxes: Any) -> Any:
    at, called, placed, centred, count = points(), 0.0, 0.0, 0.0, 0
    for logits, sides, centre, t, b in zip(*outputs, labels, boxes, strict=True):
        apart = torch.cat([at[:, None] - b[None, :, :2], b[None, :, 2:] - at[:, None]], 2)
        off = (at[:, None] - (b[:, :2] + b[:, 2:])[None] / 2).abs().amax(2)
        fits = (apart.amin(2) > 0) & (off < 1.5 * STRIDE)
        area = torch.where(fits, (b[:, 2:] - b[:, :2]).prod(1)[None], torch.inf)
        hit, owner = fits.any(1), area.argmin(1)
        is_class = torch.zeros_like(logits)
        is_class[hit, t[owner[hit]]] = 1
        called = called + focal(logits, is_class).sum()
        d, met = sides[hit] * STRIDE, b[owner[hit]]
        placed = placed + (1 - giou(torch.cat([at[hit] - d[:, :2], at[hit] + d[:, 2:]], 1), met)).sum()
        near, far = at[hit] - met[:, :2], met[:, 2:] - at[hit]
        aim = (torch.minimum(near, far) / torch.maximum(near, far)).prod(1).sqrt()
        centred = centred + F.binary_cross_entropy_with_logits(centre[hit, 0], aim, reduction="sum")
        count += int(hit.sum())
    return (called + placed + centred) / max(1, count)


def detections(outputs: Any) -> list[Detections]:
    found = []
    for logits, sides, centre in zip(*outputs, strict=True):
        scores = (torch.sigmoid(logits) * torch.sigmoid(centre)).sqrt().numpy()
        boxes = (
            torch.cat([points() - sides[:, :2] * STRIDE, points() + sides[:, 2:] * STRIDE], 1).clamp(0, SIZE).numpy()
        )
        places, labels = np.nonzero(scores >= 0.05)
        sure = scores[places, labels]
        kept = nms(boxes[places] + 2.0 * SIZE * labels[:, None], sure)[:100]
        found.append(Detections(labels[kept], sure[kept], boxes[places][kept]))
    return found


def average_precision(data: Path, epochs: int) -> float:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(epochs):
        for images, labels, boxes in DataLoader(Shapes(data / "train", True), 16, shuffle=True, collate_fn=collate):
            optimizer.zero_grad()
            loss(model(images), labels, boxes).backward()
            optimizer.step()
    model.eval()
    held_out = Shapes(data / "val", False)
    with torch.no_grad():
        found = detections(model(torch.stack([image for image, *_ in held_out])))
    truth = [Truth(t.numpy(), b.numpy(), np.zeros(len(t), bool)) for _, t, b in held_out]
    assert CLASSES == 3
    return float(mean_average_precision(found, truth)["ap"])

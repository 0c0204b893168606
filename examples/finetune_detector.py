"""Fine-tuning of a quantised detector: a file with 8-bit weights that finds discs and squares learns crosses and rings.

The file is made here first, as somebody else would have made it: trained in float, then quantised by onnxruntime's
``quantize_static``. It gets a new head for other classes, goes on training through its rounding with two losses, one
for boxes and one for classes, and is exported with the pairs of QuantizeLinear and DequantizeLinear that it came with.

    python examples/finetune_detector.py [--plot finetune_detector.svg]
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pictures

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import nn

SIZE, GRID = 32, 8  # of an image and of the cells that look for things in it
CELL = SIZE // GRID
OLD, NEW = ("disc", "square"), ("cross", "ring", "bar")
LOSSES = {"classes": gg.losses.cross_entropy(axis=-1), "boxes": ("smooth_l1", 4.0)}
Arrays = dict[str, np.ndarray]


class Detector(nn.Module):
    """For each cell which thing covers it, if any, and how far the thing reaches to the left, top, right and bottom."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inner, outer, stride in ((1, 16, 2), (16, 32, 2), (32, 32, 1), (32, 32, 1)):
            layers += [nn.Conv2d(inner, outer, 3, stride=stride, padding=1), nn.ReLU()]
        self.trunk = nn.Sequential(*layers)
        self.classes, self.boxes = nn.Conv2d(32, classes + 1, 1), nn.Conv2d(32, 4, 1)

    def forward(self, image: frontend.Tensor) -> dict[str, frontend.Tensor]:
        found = self.trunk(image)
        heads = {"classes": self.classes(found), "boxes": self.boxes(found)}
        return {name: y.permute(0, 2, 3, 1).reshape(-1, GRID * GRID, y.shape[1]) for name, y in heads.items()}


def drawn(kind: str, size: int) -> np.ndarray:
    y, x = np.mgrid[:size, :size] / (size - 1) * 2 - 1
    inside = {"disc": x * x + y * y <= 1, "square": np.ones_like(x, bool), "cross": np.minimum(abs(x), abs(y)) < 0.25,
              "ring": (x * x + y * y <= 1) & (x * x + y * y > 0.35), "bar": abs(y) < 0.4}  # fmt: skip
    return inside[kind]


def scenes(kinds: tuple[str, ...], count: int, seed: int) -> tuple[Arrays, np.ndarray]:
    """Images with one thing each, what the network should say of them, and the boxes."""
    rng = np.random.default_rng(seed)
    image = rng.normal(scale=0.25, size=(count, 1, SIZE, SIZE))
    classes, boxes = np.zeros((count, GRID, GRID), np.int64), np.zeros((count, GRID, GRID, 4))
    truth = np.zeros((count, 5))
    middles = (np.arange(GRID) + 0.5) * CELL
    for i in range(count):
        kind, size = rng.integers(len(kinds)), rng.integers(10, 17)
        left, top = rng.integers(0, SIZE - size, 2)
        image[i, 0, top : top + size, left : left + size] += drawn(kinds[kind], size)
        truth[i] = left, top, left + size, top + size, kind
        y, x = np.meshgrid(middles, middles, indexing="ij")
        covered = (x > left) & (x < left + size) & (y > top) & (y < top + size)
        reach = np.stack([x - left, y - top, left + size - x, top + size - y], -1) / SIZE
        classes[i][covered], boxes[i][covered] = kind + 1, reach[covered]
    flat = {"classes_target": classes.reshape(count, -1), "boxes_target": boxes.reshape(count, -1, 4)}
    return {"image": image.astype(np.float32), **flat, "boxes_target": flat["boxes_target"].astype(np.float32)}, truth


def detected(classes: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """The box and the kind that the surest cell of each image says."""
    chance = np.exp(classes - classes.max(-1, keepdims=True))
    chance = (chance / chance.sum(-1, keepdims=True))[..., 1:]
    cell = chance.max(-1).argmax(1)
    rows = np.arange(len(cell))
    y, x = (cell // GRID + 0.5) * CELL, (cell % GRID + 0.5) * CELL
    reach = boxes[rows, cell] * SIZE
    corners = [x - reach[:, 0], y - reach[:, 1], x + reach[:, 2], y + reach[:, 3]]
    return np.stack([*corners, chance[rows, cell].argmax(-1)], 1)


def found(guess: np.ndarray, truth: np.ndarray) -> float:
    """The share of images whose kind is right and whose box overlaps the true one by half."""
    low, high = np.maximum(guess[:, :2], truth[:, :2]), np.minimum(guess[:, 2:4], truth[:, 2:4])
    shared = np.prod(np.clip(high - low, 0, None), 1)
    area = [np.prod(np.clip(b[:, 2:4] - b[:, :2], 0, None), 1) for b in (guess, truth)]
    return float(((shared / (area[0] + area[1] - shared) > 0.5) & (guess[:, 4] == truth[:, 4])).mean())


def answers(model: onnx.ModelProto, image: np.ndarray) -> np.ndarray:
    """What plain onnxruntime says of images."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return detected(*session.run(["classes", "boxes"], {"image": image}))


def shipped(path: Path, epochs: int, count: int) -> onnx.ModelProto:
    """The detector of somebody else, in 8 bits."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    data, _ = scenes(OLD, count, 0)
    trainer = gg.Trainer(gg.build(frontend.export(Detector(len(OLD)), {"image": ("rows", 1, SIZE, SIZE)}), LOSSES,
                                  gg.optim.adamw(2e-3)))  # fmt: skip
    trainer.fit(data, epochs=epochs, batch_size=32, progress=False)
    trainer.export(path / "float.onnx")

    class Sample(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter([{"image": data["image"][:128]}])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.batches, None)

    level = logging.root.level
    logging.root.setLevel(logging.ERROR)  # it advises to prepare the model first
    quantize_static(path / "float.onnx", path / "int8.onnx", Sample(), quant_format=QuantFormat.QDQ, per_channel=True,
                    reduce_range=True, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)  # fmt: skip
    logging.root.setLevel(level)
    return onnx.load(path / "int8.onnx")


def draw(path: str, data: Arrays, before: np.ndarray, after: np.ndarray) -> None:
    """Four images with what is found in them before training (above) and after it."""
    with pictures.panels(path, 2, 4, height=4.0) as axes:
        for row, words, guesses in zip(axes, ("before", "after"), (before, after), strict=True):
            for place, image, (left, top, right, bottom, kind) in zip(row, data["image"], guesses, strict=False):
                pictures.show(place, image[0], f"{words}: a {NEW[int(kind)]}")
                place.plot([left, right, right, left, left], [top, top, bottom, bottom, top], color="tab:red")
                place.set_xlim(-0.5, SIZE - 0.5), place.set_ylim(SIZE - 0.5, -0.5)


def main(epochs: int = 30, count: int = 1000, plot: str | None = None) -> None:
    frontend.manual_seed(0)
    data, _ = scenes(NEW, count, 1)
    rest, truth = scenes(NEW, 400, 2)
    with tempfile.TemporaryDirectory() as folder:
        theirs = shipped(Path(folder), epochs, count)
    old, old_truth = scenes(OLD, 400, 3)

    headed = gg.new_head(theirs, len(NEW) + 1, output="classes")
    step = gg.build(gg.qat(headed), LOSSES, gg.optim.adam(3e-3))
    trainer = gg.Trainer(step)
    trainer.fit(data, epochs=epochs, batch_size=32, progress=False)
    mine = trainer.export()

    integers = {t.name for t in mine.graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 4}
    print(f"the original detector finds {found(answers(theirs, old['image']), old_truth):.1%} of discs and squares")
    right = found(answers(mine, rest["image"]), truth)
    print(f"with a new head and {len(integers)} layers in 8 bits it finds {right:.1%} of 400 crosses, rings and bars")
    if plot is not None:
        draw(plot, rest, *(answers(model, rest["image"][:4]) for model in (headed, mine)))


if __name__ == "__main__":
    pictures.begin(main)

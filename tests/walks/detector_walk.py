"""A detector of shapes in COCO's layout, trained as docs/how-to/detection.md says."""

from pathlib import Path

import gradgraph as gg


def average_precision(model: Path, data: Path, epochs: int) -> float:
    step = gg.build(model, gg.losses.fcos(image_size=(64, 64), strides=(8,)), gg.optim.adamw(3e-3))
    trainer = gg.Trainer(step, device="cpu")
    trainer.fit(gg.vision.coco(data / "train", augment="flip"), epochs=epochs, batch_size=16, progress=False)
    return float(gg.vision.evaluate(trainer, gg.vision.coco(data / "val"))["ap"])

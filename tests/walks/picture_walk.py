"""A folder of pictures to a classifier with a new head, as docs/how-to/images.md says: a CSV and a page of mistakes."""

from pathlib import Path

import gradgraph as gg


def accuracy(backbone: Path, data: Path, epochs: int) -> float:
    classes = len(gg.image_folder(data / "train").classes)
    step = gg.build(gg.new_head(backbone, classes), "soft_cross_entropy", gg.optim.adamw(3e-3), metrics="accuracy")
    trainer = gg.Trainer(step, device="cpu")
    augment = ["random_crop(padding=2)", "rotation(10)", "mixup(alpha=0.2)"]
    trainer.fit(gg.image_folder(data / "train", augment=augment), epochs=epochs, progress=False)
    trainer.export(data / "trained.onnx")
    gg.export.save_mistakes(trainer, data / "held_out", data / "mistakes.html")
    return float(trainer.evaluate(data / "held_out")["accuracy"])


# gradgraph predict trained.onnx --data held_out/ -o predicted.csv

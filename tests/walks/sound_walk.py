"""A folder of WAV files becomes a classifier that takes raw samples: the page on sounds, from first to last."""

from __future__ import annotations

from pathlib import Path

import gradgraph as gg
from gradgraph.frontend import Input, export, nn
from gradgraph.frontend import functional as F


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, stride=2), nn.Conv2d(8, 16, 3, stride=2)
        self.head = nn.Linear(32, classes)

    def forward(self, mel: gg.frontend.Tensor) -> gg.frontend.Tensor:
        x = F.relu(self.second(F.relu(self.first(mel))))
        return self.head(F.cat([x.mean(dim=(2, 3)), x.amax(dim=(2, 3))], dim=1))


def train(folder: Path, epochs: int) -> float:
    """Train on ``folder/train``, write ``folder/trained.onnx``, and return the accuracy on ``folder/test``."""
    gg.frontend.manual_seed(0)
    network = export(Classifier(3), {"mel": Input(("rows", 1, 40, "frames"))}, outputs=["logits"])
    model = gg.sound.log_mel(network, "whisper", sample_rate=8000, n_fft=256, hop=128, mels=40)
    trainer = gg.Trainer(gg.build(model, "cross_entropy", gg.optim.adamw(1e-2), metrics=["accuracy"]))
    trainer.fit(gg.sound.folder(folder / "train", seconds=0.5), epochs=epochs, batch_size=16, progress=False)
    trainer.export(folder / "trained.onnx")
    return float(trainer.evaluate(gg.sound.folder(folder / "test"))["accuracy"])

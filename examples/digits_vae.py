"""A variational autoencoder of handwritten digits: it learns to draw new ones.

The encoder gives a mean and a variance for each image, the code is drawn around them (``F.randn_like``), and the
decoder makes an image of it. The loss is the evidence bound, in nats per image: the error of the decoded pixels, and
the divergence of the codes from a standard normal distribution. Needs scikit-learn, for its 1,797 images of 8 by 8.

    python examples/digits_vae.py [--plot digits_vae.svg]
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime as ort
import pictures
from sklearn.datasets import load_digits

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import functional as F
from gradgraph.frontend import nn

CODE = 8  # numbers that stand for an image
Tensors = Mapping[str, frontend.Tensor]


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2 * CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, image: frontend.Tensor) -> dict[str, frontend.Tensor]:
        mean, log_variance = self.encoder(image).chunk(2, 1)
        code = mean + (log_variance / 2).exp() * F.randn_like(mean)
        return {"pixels": self.decoder(code), "mean": mean, "log_variance": log_variance}


def evidence(out: Tensors, batch: Tensors) -> dict[str, frontend.Tensor]:
    error = F.binary_cross_entropy_with_logits(out["pixels"], batch["image"], reduction="none")
    divergence = (out["mean"].square() + out["log_variance"].exp() - 1 - out["log_variance"]) / 2
    return {"error": error.sum(1).mean(), "divergence": divergence.sum(1).mean()}


def of_the_mean_image(images: np.ndarray) -> float:
    """The error, in nats per image, of who says the mean of each pixel."""
    mean = images.mean(0).clip(1e-4, 1 - 1e-4)
    return float(-(images * np.log(mean) + (1 - images) * np.log(1 - mean)).sum(1).mean())


def drawn(net: Autoencoder, count: int) -> np.ndarray:
    """New images, by the decoder as a model of its own."""
    decoder = frontend.export(nn.Sequential(net.decoder, nn.Sigmoid()), {"code": ("rows", CODE)})
    session = ort.InferenceSession(decoder.SerializeToString(), providers=["CPUExecutionProvider"])
    code = np.random.default_rng(1).normal(size=(count, CODE)).astype(np.float32)
    return np.asarray(session.run(None, {"code": code})[0]).reshape(count, 8, 8)


def main(epochs: int = 150, plot: str | None = None) -> None:
    frontend.manual_seed(0)
    images = (load_digits().data / 16).astype(np.float32)
    train, held_out = images[:1500], images[1500:]
    net = Autoencoder()
    step = gg.build(frontend.export(net, {"image": ("rows", 64)}), evidence, gg.optim.adam(3e-3))
    trainer = gg.Trainer(step)
    trainer.fit({"image": train}, epochs=epochs, batch_size=50, progress=False)
    scores = trainer.evaluate({"image": held_out})
    print(f"an image costs {scores['loss']:.2f} nats: {scores['error']:.2f} for pixels, {scores['divergence']:.2f} "
          f"for its code; by the mean image {of_the_mean_image(held_out):.2f}")  # fmt: skip
    print("it does better" if scores["loss"] < of_the_mean_image(held_out) else "it does WORSE")
    weights = trainer.state_dict()
    net.load_state_dict({name: weights[name] for name, _ in net.named_parameters()})
    if plot is not None:
        there = held_out[:8].reshape(-1, 8, 8)
        pictures.gallery(plot, [*there, *drawn(net, 16)], ["a real one"] * 8 + ["drawn"] * 16, columns=8)
    for row in np.concatenate(list(drawn(net, 6)), axis=1):
        print("".join(" .:-=+*#%@"[int(9 * shade)] * 2 for shade in row).rstrip())


if __name__ == "__main__":
    pictures.begin(main)

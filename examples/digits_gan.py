"""A generative adversarial network of handwritten digits: two networks, two losses, two optimizers, one step folder.

The discriminator learns to tell real digits from made ones, the generator to deceive it. Each is a named step of its
own over one state; ``fit`` trains both on each batch, and an average of the generator's weights draws what is shown.
How far the made digits are from real ones is a Fréchet distance of their pixels: 0 if mean and covariance are the
same. Needs scikit-learn, for its 1,797 images of 8 by 8.

    python examples/digits_gan.py [--plot digits_gan.svg]
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

CODE = 16  # numbers that an image is made of
Tensors = Mapping[str, frontend.Tensor]


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(CODE, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128),
                                       nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())  # fmt: skip
        self.discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 64),
                                           nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(64, 1))  # fmt: skip

    def forward(self, image: frontend.Tensor) -> dict[str, frontend.Tensor]:
        made = self.generator(F.randn(image.shape[0], CODE))
        return {"made": made, "of_real": self.discriminator(image), "of_made": self.discriminator(made)}


def telling_apart(out: Tensors, batch: Tensors) -> dict[str, frontend.Tensor]:
    return {"real": F.softplus(-out["of_real"]).mean(), "fake": F.softplus(out["of_made"]).mean()}


def deceiving(out: Tensors, batch: Tensors) -> frontend.Tensor:
    return F.softplus(-out["of_made"]).mean()


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The Fréchet distance between two sets of images, as if each were a normal distribution."""
    (root_values, root_vectors), covariance = np.linalg.eigh(np.cov(a.T)), np.cov(b.T)
    root = root_vectors * np.sqrt(root_values.clip(0)) @ root_vectors.T
    mixed = np.sqrt(np.linalg.eigvalsh(root @ covariance @ root).clip(0)).sum()
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + root_values.sum() + np.trace(covariance) - 2 * mixed)


def drawn(net: Gan, count: int) -> np.ndarray:
    """New images, by the generator as a model of its own."""
    model = frontend.export(net.generator, {"code": ("rows", CODE)})
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    code = np.random.default_rng(1).normal(size=(count, CODE)).astype(np.float32)
    return np.asarray(session.run(None, {"code": code})[0])


def main(epochs: int = 120, plot: str | None = None) -> None:
    frontend.manual_seed(0)
    images = (load_digits().data / 16).astype(np.float32)
    train, held_out = images[:1500], images[1500:]
    net = Gan()
    rate = gg.optim.adam(1e-3, betas=(0.5, 0.999))
    step = gg.build(frontend.export(net, {"image": ("rows", 64)}), steps={
        "discriminator": gg.StepOptions(telling_apart, rate, train="discriminator.*"),
        "generator": gg.StepOptions(deceiving, rate, train="generator.*", ema=0.99),
    })  # fmt: skip
    trainer = gg.Trainer(step)
    history = trainer.fit({"image": train}, epochs=epochs, batch_size=50, progress=False)
    print(f"losses at the end: {history['discriminator.loss'][-1]:.2f} and {history['generator.loss'][-1]:.2f}")
    state, averages = trainer.state_dict(), trainer.manifest.averages
    net.load_state_dict({name: state[averages.get(name, name)] for name in net.state_dict()})
    made, noise = drawn(net, 1000), np.random.default_rng(2).normal(train.mean(0), train.std(0), (1000, 64))
    found = [distance(held_out, other) for other in (made, noise, train)]
    print("distance to digits that were held out: {:.2f}; of independent pixels {:.2f}, of digits for training {:.2f}"
          .format(*found))  # fmt: skip
    print("it does better" if found[0] < found[1] else "it does WORSE")
    if plot is not None:
        there = held_out[:8].reshape(-1, 8, 8)
        pictures.gallery(plot, [*there, *made[:16].reshape(-1, 8, 8)], ["a real one"] * 8 + ["drawn"] * 16, columns=8)
    for row in np.concatenate(list(made[:6].reshape(-1, 8, 8)), axis=1):
        print("".join(" .:-=+*#%@"[int(9 * shade)] * 2 for shade in row).rstrip())


if __name__ == "__main__":
    pictures.begin(main)

"""What the demonstration trains: a step folder, and the data of each client in a folder of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import gradgraph as gg
from gradgraph.frontend import nn

EXAMPLES = Path(__file__).parents[1]
Arrays = dict[str, np.ndarray]
RATE = 0.1


@dataclass(frozen=True)
class Task:
    """A step, the arrays of each client, and arrays that none of them has."""

    step: gg.Step
    clients: list[Arrays]
    held_out: Arrays

    def save(self, folder: Path) -> None:
        """Write step/, client-0/, …, held-out/ as clients read them."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.step.save(folder / "step")
        for name, arrays in {
            **{f"client-{i}": c for i, c in enumerate(self.clients)},
            "held-out": self.held_out,
        }.items():
            (folder / name).mkdir()
            for column, values in arrays.items():
                np.save(folder / name / f"{column}.npy", np.ascontiguousarray(values))

    def together(self) -> Arrays:
        """The data of all clients in one place."""
        return {name: np.concatenate([client[name] for client in self.clients]) for name in self.held_out}


def by_dirichlet(target: np.ndarray, clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Rows of each client: of every class, shares drawn from a Dirichlet distribution (Hsu et al. 2019).

    The less ``alpha``, the less alike the clients. A draw that leaves a client without rows is drawn again.
    """
    rng = np.random.default_rng(seed)
    for _ in range(1000):
        parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for number in np.unique(target):
            rows = rng.permutation(np.flatnonzero(target == number))
            cuts = (np.cumsum(rng.dirichlet([alpha] * clients))[:-1] * len(rows)).round().astype(int)
            for part, share in zip(parts, np.split(rows, cuts), strict=True):
                part.append(share)
        found = [np.sort(np.concatenate(part)) for part in parts]
        if all(len(rows) for rows in found):
            return found
    raise SystemExit(f"error: alpha {alpha} leaves one of {clients} clients without rows; give a larger --alpha")


def network(norm: str) -> nn.Module:
    """Two convolutions and two linear layers. GroupNorm has no running statistics; BatchNorm's travel with weights."""
    norms: list[nn.Module] = (
        [nn.GroupNorm(4, 16), nn.GroupNorm(8, 32)] if norm == "group" else [nn.BatchNorm2d(16), nn.BatchNorm2d(32)]
    )
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), norms[0], nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), norms[1], nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def digits(clients: int, alpha: float, norm: str = "group", seed: int = 0) -> Task:
    """scikit-learn's digits, split unevenly by class."""
    from gradgraph.cli.digits import split

    gg.frontend.manual_seed(seed)
    model = gg.frontend.export(network(norm), {"x": ("batch", 1, 8, 8)}, outputs=["logits"])
    step = gg.build(model, "cross_entropy", gg.optim.sgd(RATE), metrics=["accuracy"], backend="web")
    train, held_out = split()
    parts = by_dirichlet(train["target"], clients, alpha, seed)
    return Task(step, [{name: values[rows] for name, values in train.items()} for rows in parts], held_out)


TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "A journey of a thousand miles begins with a step.",
    "Still waters run deep, and early birds catch worms.",
    "Many hands make light work of a heavy load.",
)


def language(clients: int, alpha: float, norm: str = "", seed: int = 0) -> Task:
    """A Llama in 4 bits with adapters: each client has one text, the held-out rows are all of them."""
    adapted = gg.lora(EXAMPLES / "tiny_llama_int4.onnx", ["*attn*", "*mlp*", "lm_head"], rank=8)
    step = gg.build(
        gg.surgery.language_model(adapted), gg.losses.cross_entropy(axis=-1), gg.optim.adam(5e-3), backend="web"
    )
    rows = gg.surgery.next_tokens([[1, *(ord(c) - ord(" ") + 3 for c in text), 2] for text in TEXTS])
    arrays = {spec.name: np.asarray(rows[spec.name]) for spec in step.manifest.batch}
    kept = [{name: values[i % len(TEXTS)][None] for name, values in arrays.items()} for i in range(clients)]
    return Task(step, kept, arrays)


TASKS: dict[str, Callable[..., Task]] = {"digits": digits, "language": language}

"""The cost of options: the processor time of a step with one, divided by that of the same step without any.

    python -m benchmarks.option_cost [--rounds 15] [--batch 128]

The network is an MLP 784-512-512-10 with AdamW, on one thread. All take turns, an epoch each, since another program on
the machine costs each of them alike; printed are medians. How far the second row without any is from 1 says how good
they are. `benchmarks/optimizer_cost.py` does the same for optimizers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import gradgraph as gg
from gradgraph import optim
from gradgraph.frontend import Input, Tensor, nn
from gradgraph.frontend import functional as F

Tensors = Mapping[str, Tensor]
LABELS = {"target": Input(("batch",), "int64")}
BATCHES = 8  # of an epoch


def by_function(out: Tensors, batch: Tensors) -> Tensor:
    return F.cross_entropy(out["scores"], batch["target"])


def with_noise(out: Tensors, batch: Tensors) -> Tensor:
    return F.cross_entropy(out["scores"] + 0.01 * F.randn_like(out["scores"]), batch["target"])


class Quiet:
    """A callback that does nothing."""

    def on_step(self, trainer: gg.Trainer, results: Mapping[str, Any]) -> None: ...


def builds() -> dict[str, dict[str, Any]]:
    """Options of ``gg.build`` by the name of the row."""
    adamw = optim.adamw(1e-4)
    return {
        "without": {},
        "metrics: f1, top_k, perplexity": {"metrics": ["f1", "top_k", "perplexity"]},
        "metrics: confusion matrix": {"metrics": ["accuracy", "confusion_matrix"]},
        "grad_norm": {"grad_norm": True},
        "loss as a function": {"loss": by_function, "targets": LABELS},
        "random numbers in the loss": {"loss": with_noise, "targets": LABELS},
        "two losses": {"loss": {"scores": "cross_entropy", "hidden": ("mse", 0.1)}},
        "sample_weight": {"sample_weight": True},
        "mask": {"mask": True},
        "groups of weights": {"optimizer": optim.adamw(1e-4, groups={"head.*": {"lr_factor": 2.0}}, layer_decay=0.9)},
        "without, again": {},
        "ema": {"ema": 0.999},
        "lookahead": {"optimizer": optim.lookahead(adamw)},
        "sam": {"optimizer": optim.sam(adamw)},
        "clip_by_global_norm": {"optimizer": optim.chain(optim.clip_by_global_norm(1.0), adamw)},
        "clip_by_unit_norm": {"optimizer": optim.chain(optim.clip_by_unit_norm(), adamw)},
        "a schedule": {"optimizer": optim.adamw(optim.cosine(1e-4, 1000))},
    }


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {"scores": self.head(hidden), "hidden": hidden}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=128)
    arguments = parser.parse_args()
    model = gg.frontend.export(Network(), {"x": (arguments.batch, 784)})
    rng, rows = np.random.default_rng(0), BATCHES * arguments.batch
    everything = {"x": rng.normal(size=(rows, 784)).astype(np.float32), "target": rng.integers(0, 10, rows)}
    everything |= {"scores_target": everything["target"], "hidden_target": np.zeros((rows, 512), np.float32)}
    everything |= {"sample_weight": np.ones(rows, np.float32), "mask": np.ones(rows, np.bool_)}
    epochs: dict[str, Callable[[], float]] = {}
    for name, built in builds().items():
        given = {"loss": "cross_entropy", "optimizer": optim.adamw(1e-4), **built}
        epochs[name] = epoch(gg.build(model, **given), everything, arguments.batch)
    plain = gg.build(model, optimizer=optim.adamw(1e-4))
    with tempfile.TemporaryDirectory() as folder:
        epochs["a log, a record a step"] = epoch(
            plain, everything, arguments.batch, log=Path(folder) / "log.jsonl", log_every=1
        )
        epochs["a callback"] = epoch(plain, everything, arguments.batch, callbacks=[Quiet()])
        epochs["check_inputs"] = epoch(plain, everything, arguments.batch, check_inputs=True)
        ratios: dict[str, list[float]] = {name: [] for name in epochs}
        for _ in range(arguments.rounds):
            times = {name: run() for name, run in epochs.items()}
            for name, seconds in times.items():
                ratios[name].append(seconds / times["without"])
    for name, found in ratios.items():
        print(f"{name:34}{statistics.median(found):6.2f}")


def epoch(
    step: gg.Step, data: Mapping[str, Any], batch: int, check_inputs: bool = False, **fit: Any
) -> Callable[[], float]:
    """A function that trains an epoch and gives the seconds of processor time that it took."""
    options = gg.RuntimeOptions(threads=1)
    trainer = gg.Trainer(step, device="cpu", options=options, check_inputs=check_inputs)
    names = [spec.name for spec in (*step.manifest.inputs, *step.manifest.targets)]
    prepared = trainer.prepare({name: data[name] for name in names}, batch_size=batch)

    def run() -> float:
        began = time.process_time()
        trainer.fit(prepared, epochs=1, progress=False, resume=False, **fit)
        return time.process_time() - began

    run()
    return run


if __name__ == "__main__":
    main()

"""The step folder, the data and the losses that every loop in this folder trains with.

    python make_step.py run/

writes run/step/ (what `gradgraph build` writes), run/x.bin and run/target.bin (numbers, little-endian, row by row),
run/weights.bin with weights.json (the weights before training, as one vector) and run/losses.txt: what a loop prints.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import gradgraph as gg
from gradgraph.export import flat_weights
from gradgraph.frontend import nn

BATCH, EPOCHS, ROWS = 16, 5, 64


def main(folder: Path) -> None:
    gg.frontend.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))
    model = gg.frontend.export(net, {"x": ("batch", 4)})
    step = gg.build(model, "cross_entropy", gg.optim.adamw(0.02), ema=0.9)
    folder.mkdir(parents=True, exist_ok=True)
    step.save(folder / "step", force=True)
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("<f4")
    target = x[:, :3].argmax(1).astype("<i8")
    (folder / "x.bin").write_bytes(x.tobytes())
    (folder / "target.bin").write_bytes(target.tobytes())
    flat_weights(step).save(folder / "weights.bin")
    (folder / "losses.txt").write_text("".join(f"{line}\n" for line in losses(step, x, target)))


def losses(step: gg.Step, x: np.ndarray, target: np.ndarray) -> list[str]:
    """The loss of each step, and the one of the first batch at the end, of averages of the weights, without Dropout."""
    trainer = gg.Trainer(step, device="cpu")
    batches = [{"x": x[i : i + BATCH], "target": target[i : i + BATCH]} for i in range(0, ROWS, BATCH)]
    found = [f"{float(trainer.step(batch)['loss']):.6f}" for _ in range(EPOCHS) for batch in batches]
    return [*found, f"eval {trainer.evaluate(batches[0])['loss']:.6f}"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))

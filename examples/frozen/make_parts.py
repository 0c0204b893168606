"""A new head on a frozen network, in two parts that train without Python: the files for train_head.c and .mjs.

    python examples/frozen/make_parts.py run/

writes run/parts/ (what `gradgraph build --split-frozen` writes: features.onnx and step/), both as C in run/frozen/
and run/trainer/, the data as run/x.bin and run/target.bin (numbers, little-endian, row by row) and as run/batches.json,
and run/losses.txt: the losses of the whole step in Python, which both programs print.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import gradgraph as gg
from gradgraph.frontend import nn

BATCH, EPOCHS, ROWS = 16, 3, 64
RATE = 0.05


def main(folder: Path) -> None:
    gg.frontend.manual_seed(0)
    trunk = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    )
    net = nn.Sequential(trunk, nn.Flatten(), nn.Linear(16, 4))
    model = gg.frontend.export(net, {"x": ("batch", 1, 12, 12)}, outputs=["y"])
    step = gg.build(model, "cross_entropy", gg.optim.sgd(RATE, momentum=0.9), train="2.*")
    parts = folder / "parts"
    gg.export.save_split(step, parts, force=True)
    gg.export.c(str(parts / "features.onnx"), folder / "frozen", name="frozen", sizes={"batch": 1}, force=True)
    gg.export.c(parts / "step", folder / "trainer", sizes={"batch": BATCH}, force=True)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 1, 12, 12)).astype("<f4")
    target = rng.integers(0, 4, ROWS).astype("<i8")
    (folder / "x.bin").write_bytes(x.tobytes())
    (folder / "target.bin").write_bytes(target.tobytes())
    batches = [{"x": x[i : i + BATCH], "target": target[i : i + BATCH]} for i in range(0, ROWS, BATCH)]
    listed = [{n: {"dims": a.shape, "data": a.ravel().tolist()} for n, a in batch.items()} for batch in batches]
    (folder / "batches.json").write_text(json.dumps(listed))
    trainer = gg.Trainer(step, device="cpu")
    losses = [float(trainer.step(batch)["loss"]) for _ in range(EPOCHS) for batch in batches]
    (folder / "losses.txt").write_text("".join(f"{loss:.6f}\n" for loss in losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

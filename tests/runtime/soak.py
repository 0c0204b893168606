"""A long run in flat memory.

    python -m tests.runtime.soak [--steps 100000]

Trains a small network with ``fit`` (checkpoints, validation and history included) and with ``step``, half of the steps
each, and prints the memory of the process as it goes. It fails if that grows by more than 4 MB once a tenth is done.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from gradgraph.runtime.execution.session import RuntimeOptions  # noqa: E402
from gradgraph.runtime.trainer import Trainer  # noqa: E402
from tests.kit import handmade  # noqa: E402

ROOM = 4 << 20
BATCHES = 100  # in an epoch


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def soak(steps: int, folder: Path) -> list[tuple[int, int]]:
    """Steps done and the memory then, twenty times."""
    trainer = Trainer(handmade.classifier(), device="cpu", options=RuntimeOptions(threads=1))
    data, held_out = handmade.points(16 * BATCHES), handmade.points(64, seed=1)
    seen: list[tuple[int, int]] = []
    every = max(steps // 20, 1)

    class Watch:
        def on_epoch(self, t: Trainer, row: object) -> None:
            if t.progress.steps // every > len(seen):
                seen.append((t.progress.steps, resident()))

    rates = {"learning_rate": 1e-3}
    trainer.fit(data, epochs=steps // 2 // BATCHES, batch_size=16, validation=held_out, callbacks=[Watch()],
                checkpoint=folder / "run.ckpt", progress=False, **rates)  # fmt: skip
    while trainer.progress.steps < steps:
        i = trainer.progress.steps % BATCHES
        trainer.step({name: column[16 * i : 16 * i + 16] for name, column in data.items()}, **rates)
        if trainer.progress.steps % every == 0:
            seen.append((trainer.progress.steps, resident()))
    return seen


def growth(seen: list[tuple[int, int]]) -> int:
    """Bytes, from a tenth of the run to the largest after it."""
    settled = seen[len(seen) // 10 :]
    return max(memory for _, memory in settled) - settled[0][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=100_000)
    given = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        seen = soak(given.steps, Path(folder))
    for steps, memory in seen:
        print(f"{steps:8,} steps  {memory / 2**20:7.1f} MB")
    grown = growth(seen)
    print(f"{given.steps:,} steps in {time.perf_counter() - began:.0f} s; memory grew by {grown / 2**20:.2f} MB")
    if grown > ROOM:
        raise SystemExit("that is more than 4 MB: something is kept")


if __name__ == "__main__":
    main()

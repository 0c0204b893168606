"""Runs that one number of ranks begins and another one ends, for test_other_ranks.py.

mpiexec -n 4 python tests/parallel/other_ranks.py begin FOLDER
mpiexec -n 2 python tests/parallel/other_ranks.py end FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

import gradgraph as gg  # noqa: E402
from tests.kit.command_line import mlp  # noqa: E402
from tests.parallel.ranks_cases import data, wide  # noqa: E402

KINDS: dict[str, dict[str, Any]] = {
    "shard_state": {"shard_state": True},
    "top_k": {"compress": "top_k(ratio=0.1)"},
    "power_sgd": {"compress": "power_sgd(rank=1)"},
    "diloco": {"compress": "diloco(every=4)"},
}
BEGUN = 7  # steps


def trainer(parallel: gg.DataParallel | None, kind: str) -> gg.Trainer:
    optimizer = "sgd(lr=0.05)" if kind == "top_k" else "adamw(lr=0.01)"
    step = gg.build(wide(mlp()), optimizer=optimizer, ema=0.9)
    return gg.Trainer(step, device="cpu", seed=3, options=gg.RuntimeOptions(threads=1), parallel=parallel)


def train(own: gg.Trainer, **options: Any) -> None:
    own.fit(data(), 4, 10, progress=False, **options)


def errors(own: gg.Trainer, parallel: gg.DataParallel) -> dict[str, np.ndarray]:
    """What compression has left out, of all ranks together; what all have alike, once."""
    compression = own._session.team._compress
    if compression is None:
        return {}
    memory = {n: a for n, a in compression.memory.items() if not compression.is_shared(n)}
    ranks = parallel.team().gathered(memory)
    shared = {f"shared {n}": a for n, a in compression.memory.items() if compression.is_shared(n)}
    return {**shared, **{name: np.sum([rank[name] for rank in ranks], axis=0) for name in memory}}


class Saving:
    """Saves in the middle of a round of steps that each rank takes alone."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step(self, owner: gg.Trainer, results: Any) -> None:
        if owner.progress.steps == BEGUN:
            owner.save(self.path)


def begin(folder: Path) -> None:
    for kind, ways in KINDS.items():
        parallel = gg.DataParallel(check_every=1, **ways)
        own = trainer(parallel, kind)
        if kind == "diloco":
            train(own, max_steps=BEGUN + 1, callbacks=[Saving(folder / f"{kind}.ckpt")])
        else:
            train(own, max_steps=BEGUN)
            own.save(folder / f"{kind}.ckpt")
        found = errors(own, parallel)
        if parallel.is_first:
            np.savez(folder / f"{kind}.before.npz", **found)


def end(folder: Path) -> None:
    for kind, ways in KINDS.items():
        parallel = gg.DataParallel(check_every=1, **ways)
        own = trainer(parallel, kind)
        own.load(folder / f"{kind}.ckpt")
        train(own, max_steps=BEGUN, resume=True)  # which takes no step
        assert own.progress.steps == BEGUN
        found = errors(own, parallel)
        train(own, resume=True)
        state = own.state_dict()
        if parallel.is_first:
            np.savez(folder / f"{kind}.after.npz", **found)
            np.savez(folder / f"{kind}.state.npz", **state)


if __name__ == "__main__":
    {"begin": begin, "end": end}[sys.argv[1]](Path(sys.argv[2]))

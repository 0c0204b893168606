"""Ranks that keep features of frozen layers, compared with ranks that do not; started by mpiexec."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from mpi4py import MPI

import gradgraph as gg
from tests.runtime.test_keep_features import head_only, points


def fitted(rows: int, keep: bool, **parallel: Any) -> tuple[dict[str, list[float]], dict[str, np.ndarray]]:
    options = gg.RuntimeOptions(threads=1)
    trainer = gg.Trainer(head_only(), device="cpu", seed=3, options=options, parallel=gg.DataParallel(**parallel))
    history = trainer.fit(points(rows), 3, 8, learning_rate=0.05, progress=False, keep_features=keep,
                          validation=points(11, 1))  # fmt: skip
    return {name: list(column) for name, column in history.items()}, trainer.state_dict()


def compare(rows: int, **parallel: Any) -> None:
    one, state = fitted(rows, True, **parallel)
    other, expected = fitted(rows, False, **parallel)
    assert one == other and all(np.array_equal(state[name], expected[name]) for name in expected)


if __name__ == "__main__":
    for count in (32, 27, 25):  # in the last batch of 25, one rank has no sample
        compare(count)
    compare(27, shard_state=True)
    if MPI.COMM_WORLD.rank == 0:
        sys.stdout.write("same")

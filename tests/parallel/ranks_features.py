"""Ranks that keep features of frozen layers, compared with ranks that do not; started by mpiexec with a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import gradgraph as gg
from gradgraph.runtime.features import kept_rows
from tests.kit.jittered import Jittered
from tests.runtime.test_keep_features import head_only, points
from tests.runtime.test_kept_tokens import padded_rows, pooled_step

Fitted = tuple[dict[str, list[float]], dict[str, Any], dict[str, np.ndarray]]
FIT: dict[str, Any] = {"learning_rate": 0.05, "progress": False}


def fitted(step: gg.Step, data: Any, validation: Any, parallel: dict[str, Any], **kept: Any) -> Fitted:
    options = gg.RuntimeOptions(threads=1)
    trainer = gg.Trainer(step, device="cpu", seed=3, options=options, parallel=gg.DataParallel(**parallel))
    history = trainer.fit(data, 3, 8, validation=validation, **FIT, **kept)
    evaluated = trainer.evaluate(validation)
    return {name: list(column) for name, column in history.items()}, evaluated, trainer.state_dict()


def compare(data: Any, variants: int | None = None, step: gg.Step | None = None, validation: Any = None,
            **parallel: Any) -> None:  # fmt: skip
    step, validation = step or head_only(), validation or points(11, 1)
    one, found, state = fitted(step, data, validation, parallel, keep_features=True, feature_variants=variants)
    other, wanted, expected = fitted(step, data, validation, parallel)
    assert one == other and found == wanted
    assert all(np.array_equal(state[name], expected[name]) for name in expected)


def resume(data: Any, folder: Path) -> None:
    """Stop within the second epoch, and go on from the checkpoint."""
    step, options, path = head_only(), gg.RuntimeOptions(threads=1), folder / "run.ckpt"
    _, _, expected = fitted(step, data, points(11, 1), {})
    kept: dict[str, Any] = {"keep_features": True, "feature_variants": 3 if isinstance(data, Jittered) else None}
    given = {"device": "cpu", "options": options, "parallel": gg.DataParallel()}
    gg.Trainer(step, seed=3, **given).fit(data, 3, 8, checkpoint=path, max_steps=6, **FIT, **kept)
    MPI.COMM_WORLD.barrier()
    trainer = gg.Trainer.resume(step, path, **given)
    trainer.fit(data, 3, 8, checkpoint=path, resume=True, **FIT, **kept)
    state = trainer.state_dict()
    assert all(np.array_equal(state[name], expected[name]) for name in expected)


if __name__ == "__main__":
    for count in (32, 27, 25):  # in the last batch of 25, one rank has no sample
        compare(points(count))
        compare(Jittered(points(count), mixes=count == 27), 3)
    compare(points(27), shard_state=True)
    compare(padded_rows(27), step=pooled_step(), validation=padded_rows(9))
    resume(points(27), Path(sys.argv[1]))
    kept_rows.free_memory = lambda: 100  # in files
    resume(Jittered(points(27)), Path(sys.argv[1]))
    if MPI.COMM_WORLD.rank == 0:
        sys.stdout.write("same")

"""Runs of random options on several ranks, each of which equals one process or is refused by name before a step.

    mpiexec -n 2 python tests/parallel/ranks_walk.py FOLDER FIRST COUNT

writes state and history of each run, or the sentence that refuses it, to ``FOLDER/<number>.npz``.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

import gradgraph as gg  # noqa: E402
from gradgraph import optim  # noqa: E402
from gradgraph.frontend import functional as F  # noqa: E402
from tests.parallel.ranks_cases import ROWS, Case, data, doubled, mlp, normed, values, wide  # noqa: E402


def masked(out: Any, batch: Any, scores: str = "logits") -> Any:
    losses = F.cross_entropy(out[scores], batch["y"], reduction="none")
    return (losses * batch["m"]).sum() / batch["m"].sum()


def masked_behind_norms(out: Any, batch: Any) -> Any:
    return masked(out, batch, "output")  # as that network calls its scores


def with_mask(normed: bool, ignored: bool) -> dict[str, np.ndarray]:
    found = (doubled if normed else data)(ignored=False)
    return {"x": found["x"], "y": found["target"], "m": np.linspace(0, 1, ROWS)}


def weighed(normed: bool, ignored: bool) -> dict[str, np.ndarray]:
    found = doubled(ignored) if normed else data(ignored=ignored)
    return {**found, "sample_weight": np.linspace(0, 1, ROWS, dtype=np.float32)}


def labelled(normed: bool, ignored: bool) -> dict[str, np.ndarray]:
    return doubled(ignored) if normed else data(ignored=ignored)


def of_numbers(normed: bool, ignored: bool) -> dict[str, np.ndarray]:
    return {**doubled(), "target": np.sin(doubled()["x"][:, 0, 0, :3])} if normed else values()


WEIGHTS = [0.2, 1.0, 3.0]
LOSSES: list[tuple[dict[str, Any], Any]] = [
    ({"loss": "cross_entropy"}, labelled),
    ({"loss": gg.losses.cross_entropy(weight=WEIGHTS)}, labelled),
    ({"loss": gg.losses.cross_entropy(weight=WEIGHTS, label_smoothing=0.1)}, labelled),
    ({"loss": gg.losses.cross_entropy(weight=WEIGHTS, reduction="sum")}, labelled),
    ({"loss": gg.losses.focal(weight=WEIGHTS)}, labelled),
    ({"loss": gg.losses.mse("sum")}, of_numbers),
    ({"loss": "mse"}, of_numbers),
    ({"loss": gg.losses.cross_entropy(weight=WEIGHTS), "sample_weight": True}, weighed),
    ({"loss": masked, "targets": {"y": gg.frontend.Input(("N",), "int64"), "m": gg.frontend.Input(("N",), "float64")}},
     with_mask),
]  # fmt: skip


def drawn(number: int) -> tuple[Case, dict[str, Any]]:
    """A run, and how its ranks work together."""
    rng = np.random.default_rng(number)

    def either(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    has_norms = bool(rng.random() < 0.25)
    loss, make = LOSSES[rng.integers(len(LOSSES))]
    loss = {**loss, "loss": masked_behind_norms} if has_norms and loss["loss"] is masked else loss
    rate = either(0.01, optim.cosine(0.01, 12), optim.linear(0.01, 12))
    how = either(optim.adamw, optim.sgd, functools.partial(optim.sgd, momentum=0.9))
    # sums are as large as a batch
    base = how(optim.constant(1e-4) if how is not optim.adamw and "sum" in str(loss["loss"]) else rate)
    optimizer = optim.chain(optim.clip_by_global_norm(0.5), base) if rng.random() < 0.4 else base
    accumulate = either(None, None, 2, 3)
    options = {**loss, "optimizer": optimizer, "metrics": [], "accumulate": accumulate is not None,
               "ema": either(None, 0.9), "grad_norm": bool(rng.random() < 0.25),
               "recompute": either(None, None, "sqrt")}  # fmt: skip
    options = {name: value for name, value in options.items() if value is not None}
    fit = {"batch_size": either(8, 10, 12), "shuffle": bool(rng.random() < 0.5)}
    fit |= {} if accumulate is None else {"accumulate": accumulate}
    ways = {"shard_state": bool(rng.random() < 0.4), "sync_batch_norm": has_norms}
    # AdamW divides by what is rounded, and sums behind norms nearly cancel, so that roundings are all that is left
    if not ways["shard_state"] and how is not optim.adamw and not has_norms and rng.random() < 0.3:
        ways["compress"] = either("float16", "bfloat16")
    ignored = bool(rng.random() < 0.5)
    if ignored:  # or all that is left for the last batch may be, which is refused everywhere
        fit["drop_last"] = True
    found = functools.partial(make, has_norms, ignored)
    if rng.random() < 0.4:
        fit["validation"] = found()
    tolerance = 2e-2 if "compress" in ways else 1e-6
    return Case(options, found, fit, normed if has_norms else lambda: wide(mlp()), tolerance), ways


def main(folder: Path, first: int, count: int) -> None:
    for number in range(first, first + count):
        case, ways = drawn(number)
        parallel = gg.DataParallel(check_every=1, **ways)
        try:
            state, history = case.trained(parallel)
        except gg.errors.BuildError as error:
            state, history = {}, {"refused": [str(error)]}  # type: ignore[list-item]
        if parallel.is_first:
            np.savez(folder / f"{number}.npz", **{f"state {n}": value for n, value in state.items()},
                     history=json.dumps(history))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

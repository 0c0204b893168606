"""Sums of compressed gradients for test_compression.py, and NumPy references of what each compression does.

mpiexec -n 4 python tests/parallel/compressed.py sums FOLDER
mpiexec -n 4 python tests/parallel/compressed.py digits COMPRESSION FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

import gradgraph as gg  # noqa: E402
from gradgraph.frontend import nn  # noqa: E402
from gradgraph.parallel.compressions import COMPRESSIONS  # noqa: E402

SHAPES = {"weight": (12, 8), "kernel": (6, 2, 3), "bias": (12,)}
STEPS = 4
TRIED = ["float16", "bfloat16", "top_k(ratio=0.1)", "top_k(ratio=0.1, feedback=False)", "power_sgd(rank=1)"]


OWN = "multiples(step=0.25)"  # a compression of the user's own


def multiples(step: float = 0.25) -> gg.extend.Compression:
    """Multiples of ``step``, in one byte."""

    class Multiples(gg.extend.Compression):
        def add_up(self, part: str, flat: Any, tensors: Any, team: gg.extend.Messages) -> None:
            own = np.zeros((team.ranks, flat.size), np.int8)
            own[team.rank] = np.round(flat / step)
            team.all_gather(own.reshape(-1), [flat.size] * team.ranks)
            flat[...] = own.sum(axis=0, dtype=np.float32) * step

    return Multiples()


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(100 * rank + step)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def flat(tensors: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([t.ravel() for t in tensors.values()])


ROUNDS = {"local_sgd(every=3)": (3, 1.0, 0.0), "diloco(every=2, outer_lr=0.7, momentum=0.9)": (2, 0.7, 0.9)}
ROWS, BATCH, RATE = 48, 8, 0.05


def line() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 5))
    return x.astype(np.float32), np.sin(x[:, :2] + np.arange(ROWS)[:, None] % 3).astype(np.float32)


def rounds(folder: Path) -> None:
    """Train a linear model in rounds of local steps, one epoch in order."""
    found, (x, y) = {}, line()
    for name in ROUNDS:
        parallel = gg.DataParallel(compress=name, check_every=1)
        step = gg.build(gg.frontend.export(nn.Linear(5, 2, bias=False), {"x": ("batch", 5)}), "mse", f"sgd(lr={RATE})")
        own = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(threads=1), parallel=parallel)
        found[f"{name} start"] = next(iter(own.parameters.values()))
        own.fit({"x": x, "target": y}, 1, BATCH, shuffle=False, progress=False)
        found[name] = next(iter(own.parameters.values()))
    if parallel.is_first:
        np.savez(folder / "rounds.npz", **found)


def outer_steps(name: str, start: np.ndarray, ranks: int) -> np.ndarray:
    """Douillard et al. 2023, algorithm 1, with SGD inside; the last round of an epoch ends with it."""
    (every, rate, momentum), (x, y) = ROUNDS[name], line()
    theta, velocity, workers, steps = start.astype(np.float64), 0.0, [start.astype(np.float64)] * ranks, ROWS // BATCH
    since = 0
    for step in range(steps):
        for rank, w in enumerate(workers):
            rows = slice(step * BATCH + rank, (step + 1) * BATCH, ranks)
            errors = x[rows] @ w.T - y[rows]
            workers[rank] = w - RATE * 2 * errors.T @ x[rows] / errors.size
        since += 1
        if since == every or step + 1 == steps:
            gradient = theta - np.mean(workers, axis=0)
            velocity = momentum * velocity + gradient
            theta = theta - rate * (gradient + momentum * velocity)
            workers, since = [theta] * ranks, 0
    return theta


def sums(folder: Path) -> None:
    """Add up the same gradients by each compression, as ranks do."""
    parallel = gg.DataParallel()
    team = parallel.team()
    found = {}
    gg.extend.compression(multiples)
    for name in [*TRIED, OWN]:
        compression = COMPRESSIONS.typed(name)
        for step in range(STEPS):
            array = flat(gradients(parallel.rank, step))
            views, first = {}, 0
            for tensor, shape in SHAPES.items():
                size = int(np.prod(shape))
                views[tensor] = array[first : first + size].reshape(shape)
                first += size
            compression.add_up("0", array, views, team)
            compression.settle()
            assert all(np.array_equal(array, other) for other in team.gathered(array)), "the same bits on all ranks"
            found[f"{name} {step}"] = array
    if parallel.is_first:
        np.savez(folder / "sums.npz", **found)


# --- references, of all ranks in one process ------------------------------------------------------------------


def rounded(dtype: object, ranks: int) -> list[np.ndarray]:
    found = []
    for step in range(STEPS):
        wires = [flat(gradients(rank, step)).astype(dtype).astype(np.float32) for rank in range(ranks)]
        found.append(np.sum(wires, axis=0).astype(dtype).astype(np.float32))
    return found


def top_k(ratio: float, feedback: bool, ranks: int) -> list[np.ndarray]:
    """Stich et al. 2018, algorithm 1, without its rate: g + e is sent where it is largest, the rest is the new e."""
    errors = [np.zeros(sum(int(np.prod(s)) for s in SHAPES.values()), np.float32) for _ in range(ranks)]
    found = []
    for step in range(STEPS):
        total = np.zeros_like(errors[0])
        for rank in range(ranks):
            wanted = flat(gradients(rank, step)) + errors[rank]
            kept = np.argsort(-np.abs(wanted), kind="stable")[: int(np.ceil(ratio * wanted.size))]
            sent = np.zeros_like(wanted)
            sent[kept] = wanted[kept]
            total += sent
            errors[rank] = (wanted - sent) * feedback
        found.append(total)
    return found


def power_sgd(rank: int, ranks: int) -> list[np.ndarray]:
    """Vogels et al. 2019, algorithms 1 and 2, for sums: P = ΣMQ, made orthogonal; Q = ΣMᵀP; what is applied is PQᵀ."""
    bases = {n: np.random.default_rng(0).normal(size=(int(np.prod(s[1:])), rank)).astype(np.float32)
             for n, s in SHAPES.items() if len(s) > 1}  # fmt: skip
    errors = [{n: np.zeros((s[0], int(np.prod(s[1:]))), np.float32) for n, s in SHAPES.items()} for _ in range(ranks)]
    found = []
    for step in range(STEPS):
        result = {}
        for name, shape in SHAPES.items():
            given = [gradients(r, step)[name].reshape(shape[0], -1) for r in range(ranks)]
            if name not in bases:
                result[name] = np.sum(given, axis=0)
                continue
            wanted = [g + errors[r][name] for r, g in enumerate(given)]
            side = np.linalg.qr(np.sum([m @ bases[name] for m in wanted], axis=0))[0]
            parts = [m.T @ side for m in wanted]
            for r, (m, part) in enumerate(zip(wanted, parts, strict=True)):
                errors[r][name] = m - side @ part.T
            bases[name] = np.sum(parts, axis=0)
            result[name] = side @ bases[name].T
        found.append(flat(result))
    return found


def of_multiples(step: float, ranks: int) -> list[np.ndarray]:
    return [np.sum([np.round(flat(gradients(rank, i)) / step) * step for rank in range(ranks)], axis=0)
            for i in range(STEPS)]  # fmt: skip


def references(ranks: int) -> dict[str, list[np.ndarray]]:
    return dict(zip([*TRIED, OWN], [
        rounded(np.float16, ranks), rounded(ml_dtypes.bfloat16, ranks), top_k(0.1, True, ranks),
        top_k(0.1, False, ranks), power_sgd(1, ranks), of_multiples(0.25, ranks),
    ], strict=True))  # fmt: skip


if __name__ == "__main__":
    sums(Path(sys.argv[1]))
    rounds(Path(sys.argv[1]))

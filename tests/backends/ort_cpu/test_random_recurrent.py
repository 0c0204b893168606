"""Random recurrent networks: lowered steps move every weight as the portable file does, and as float64 has it."""

from __future__ import annotations

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.backends.ort_cpu.recurrent import shared_states as recurrent
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.verify.reference import Oracle, in_float64
from tests.kit.random_recurrent import Graph, batch, network
from tests.kit.running import Loop

Arrays = dict[str, np.ndarray]
SEEDS = range(40)


def wide(arrays: Arrays) -> Arrays:
    return {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in arrays.items()}


def by_trainer(step: gg.Step, batches: list[Arrays]) -> list[Arrays]:
    """The loss and the state after each step."""
    trainer = gg.Trainer(step, device="cpu", options=RuntimeOptions(threads=1))
    return [{"loss": trainer.step(b)["loss"], **trainer.state_dict()} for b in batches]


def by_file(step: gg.Step, batches: list[Arrays]) -> list[Arrays]:
    loop = Loop(step)
    return [{"loss": loop(b)["loss"], **loop.state} for b in batches]


def in_oracle(step: gg.Step, batches: list[Arrays]) -> list[Arrays]:
    train, state = Oracle(in_float64(step.train)), Oracle(in_float64(step.init))({})
    rates = {name: np.array(rate) for name, rate in step.manifest.hyperparameters.items()}
    found = []
    for b in batches:
        results = train({**wide(b), **rates, **state})
        state = {s.name: results[s.next] for s in step.manifest.state}
        found.append({"loss": results["loss"], **state})
    return found


@pytest.mark.sweep(0.057)
@pytest.mark.parametrize("seed", SEEDS)
def test_three_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second batch is of another size where the model allows it, and so runs in the general session."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(recurrent, "LEAST_WORK", int(rng.choice([1, 1, 200, 5000])))
    T, N, shorter, fewer = (int(rng.choice([1, 2, 3, 4, 7])) for _ in range(4))
    steps, sequences = T if rng.random() < 0.5 else "T", N if rng.random() < 0.5 else "N"
    g = Graph(rng, steps, sequences)
    model = network(g, int(rng.integers(1, 5)))
    other = (T if steps == T else shorter, N if sequences == N else fewer)
    batches = [batch(g, model, *sizes) for sizes in ((T, N), other, (T, N))]
    portable, auto = (gg.build(model, None, gg.optim.sgd(0.1), backend=t) for t in ("portable", "auto"))
    first, expected = Loop(portable).state, in_oracle(portable, batches)
    for found in (by_trainer(auto, batches), by_file(portable, batches)):
        for before, mine, theirs in zip([first, *expected], found, expected, strict=False):
            assert float(mine["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-4, abs=1e-5)
            moves = {n: theirs[n] - before[n].astype(np.float64) for n in first}
            whole = np.sqrt(sum(np.sum(m**2) for m in moves.values()))
            for name, move in moves.items():
                gap = np.linalg.norm(mine[name] - theirs[name])
                rounding = 1e-6 * np.linalg.norm(theirs[name])
                assert gap <= 1e-4 * np.linalg.norm(move) + 1e-5 * whole + rounding, name

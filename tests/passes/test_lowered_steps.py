"""Whole training and evaluation steps in this machine's form: the numbers of the portable file, step after step.

Networks are small, but wide enough that the tables choose their special forms; the batch is fixed or open.
"""

from __future__ import annotations

import numpy as np
import pytest
from lowered_networks import NETWORKS, batches, feeds_of, step
from running import run

import gradgraph as gg
from gradgraph.passes.lower import ORT_CPU, for_machine, recurrent


@pytest.fixture(autouse=True)
def lower_small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "LEAST_WORK", 1)


@pytest.mark.parametrize("rows", [8, "n"], ids=["fixed", "open"])
@pytest.mark.parametrize("name", NETWORKS)
def test_lowered_steps_train_alike(name: str, rows: int | str) -> None:
    built = step(name, rows, gg.optim.sgd(0.05, momentum=0.9))
    sizes = {} if rows == 8 else {"n": 8}
    lowered = for_machine(built.train, ORT_CPU, sizes)
    states = [run(built.init), run(built.init)]
    for batch in batches(name, 8, 3):
        for i, model in enumerate((built.train, lowered)):
            results = run(model, feeds_of(model, batch, states[i]))
            states[i] = {s.name: results[s.next] for s in built.manifest.state} | {"loss": results["loss"]}
        for key, value in states[0].items():
            scale = max(1.0, float(np.abs(value).max(initial=0.0)))
            np.testing.assert_allclose(states[1][key], value, rtol=1e-3, atol=1e-4 * scale, err_msg=f"{name}: {key}")


@pytest.mark.parametrize("name", NETWORKS)
def test_lowered_evaluation_is_alike_at_every_size(name: str) -> None:
    built = step(name, "n", gg.optim.sgd(0.05))
    lowered = for_machine(built.eval, ORT_CPU)
    state = run(built.init)
    for rows in (1, 5):
        (batch,) = batches(name, rows, 1)
        given = feeds_of(built.eval, batch, state)
        for a, b in zip(run(built.eval, given).values(), run(lowered, given).values(), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)

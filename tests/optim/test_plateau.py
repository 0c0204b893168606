"""reduce_on_plateau: against ReduceLROnPlateau, in fit, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph import optim
from gradgraph.errors import BuildError, DataError
from tests.kit.optim_cases import X, Y, network

FIGURES = [3.0, 2.0, 2.0, 1.9999, 2.1, 1.5, 1.6, 1.6, 1.6, 1.6, 1.4, 1.4, 1.4, 1.4, 1.4, 1.4, 1.4, 1.4, 0.1, 0.1]
CASES: dict[str, dict[str, Any]] = {
    "plain": {"patience": 2},
    "cooldown": {"patience": 1, "cooldown": 3, "factor": 0.5},
    "absolute": {"patience": 1, "threshold": 0.2, "threshold_mode": "abs", "min_lr": 1e-3},
    "rising": {"patience": 1, "mode": "max", "factor": 0.3},
}


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_rates_are_those_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **CASES[name])
    ours = optim.reduce_on_plateau(0.1, **CASES[name])
    for i, figure in enumerate(FIGURES, start=1):
        theirs.step(figure)
        assert ours.rate({"loss": FIGURES[:i]}) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)


def fitted(trainer: gg.Trainer, epochs: int, **options: Any) -> dict[str, list[float]]:
    data = {"x": X[:4].reshape(-1, 4), "target": Y[:4].reshape(-1, 3)}
    rate = optim.reduce_on_plateau(0.5, patience=0, threshold=0.3)
    return trainer.fit(data, epochs, 16, learning_rate=rate, progress=False, **options)


def test_fit_follows_it_and_goes_on_with_it_after_a_resume(tmp_path: Path) -> None:
    step = gg.build(network(), "mse", optim.sgd(0.5))
    straight = gg.Trainer(step, device="cpu")
    history = fitted(straight, 6)
    assert history["learning_rate"][0] == 0.5 and history["learning_rate"][-1] < 0.01
    half = gg.Trainer(step, device="cpu")
    fitted(half, 6, max_steps=13, checkpoint=tmp_path / "run.ckpt")  # in the fourth epoch
    resumed = gg.Trainer.resume(step, tmp_path / "run.ckpt", device="cpu")
    assert fitted(resumed, 6) == history
    expected = straight.state_dict()
    assert all(np.array_equal(value, expected[n]) for n, value in resumed.state_dict().items())


def test_what_it_monitors_must_be_there() -> None:
    trainer = gg.Trainer(gg.build(network(), "mse", "sgd"), device="cpu")
    rate = optim.reduce_on_plateau(0.5, monitor="val_los")
    with pytest.raises(DataError, match="reduce_on_plateau monitors 'val_los'"):
        trainer.fit({"x": X[0], "target": Y[0]}, 3, learning_rate=rate, progress=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"factor": 1.5}, "factor must be"), ({"mode": "up"}, "mode must be min or max"), ({"patience": -1}, "negative")],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(BuildError, match=says):
        optim.reduce_on_plateau(0.1, **arguments)

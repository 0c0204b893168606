"""Random numbers in networks and losses: their distributions, and what step, evaluation and export make of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.errors import ModelError
from gradgraph.frontend import Input, export, nn
from gradgraph.frontend import functional as F
from tests.kit.frontend_parity import declared_shapes_hold, drawn, run_model
from tests.kit.running import Loop, resumed

ROWS = 4000
SHARES = np.array([0.1, 0.0, 0.6, 0.3], np.float32)


def taken(function: Callable[[Any], Any], x: np.ndarray, where: str) -> np.ndarray:
    """What ``function`` of traced tensors draws, run as a file, or as part of a training step."""
    if where == "file":
        model = export(lambda x: {"y": function(x)}, {"x": Input(("rows", *x.shape[1:]), x.dtype.name)})
        declared_shapes_hold(model, {"x": x})
        return run_model(model, {"x": x})["y"]
    frontend.manual_seed(0)
    one = export(nn.Linear(1, 1, bias=False), {"one": (1, 1)}, outputs=["y"])
    shape = ("rows", *x.shape[1:])
    found = []
    for reads in (lambda y: y, lambda y: y * y):

        def loss(out: Any, batch: Any, reads: Any = reads) -> dict[str, Any]:
            y = function(batch["x"]).float()
            return {"loss": out["y"].sum() + 0 * reads(y).sum(), "mean": reads(y).mean()}

        step = gg.build(one, loss, gg.optim.sgd(0.0), targets={"x": Input(shape, x.dtype.name)})
        found.append(float(Loop(step)({"one": np.ones((1, 1), np.float32), "x": x})["mean"]))
    return np.array(found)


X = np.zeros((ROWS, 2), np.float32)
DRAWS: dict[str, tuple[Callable[[Any], Any], float, float]] = {  # mean, mean square
    "rand": (lambda x: F.rand(x.shape[0], 3), 1 / 2, 1 / 3),
    "rand of fixed size": (lambda x: F.rand((ROWS, 3)) + 0 * x[:, :1], 1 / 2, 1 / 3),
    "randn": (lambda x: F.randn(x.shape), 0, 1),
    "randn of float64": (lambda x: F.randn(ROWS, 2, dtype="float64") + x.double() * 0, 0, 1),
    "rand_like": (lambda x: F.rand_like(x), 1 / 2, 1 / 3),
    "randn_like": (lambda x: F.randn_like(x, dtype="float32"), 0, 1),
    "randint": (lambda x: F.randint(2, 6, (x.shape[0], 2)), 3.5, 13.5),
    "randint from 0": (lambda x: F.randint(3, (x.shape[0],)), 1, 5 / 3),
    "bernoulli": (lambda x: F.bernoulli(x + 0.2), 0.2, 0.2),
    "multinomial": (lambda x: F.multinomial(x[:, :1] + SHARES, 2, replacement=True), 2.1, 5.1),
    "multinomial once": (lambda x: F.multinomial(x[:, :1] + SHARES, 1), 2.1, 5.1),
    "multinomial of a vector": (lambda x: F.multinomial(SHARES, ROWS, replacement=True) + 0 * x[0, 0], 2.1, 5.1),
    "multinomial without replacement": (lambda x: F.multinomial(x[:, :1] + SHARES, 3), 5 / 3, 13 / 3),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(F.log(x[:, :1] + [0.25, 0.75]), hard=True)[:, 0], 0.25, 0.25),
}


@pytest.mark.sweep(0.48)
@pytest.mark.parametrize("where", ["file", "step"])
@pytest.mark.parametrize("name", DRAWS)
def test_distributions(name: str, where: str) -> None:
    function, mean, square = DRAWS[name]
    found = taken(function, X, where)
    moments = [found.mean(), (found.astype(np.float64) ** 2).mean()] if where == "file" else found
    np.testing.assert_allclose(moments, [mean, square], atol=0.07 * max(1.0, square))


def test_samples_without_replacement_are_different_classes_in_the_order_of_their_draw() -> None:
    found = taken(lambda x: F.multinomial(x[:, :1] + SHARES, 3), X, "file")
    assert {frozenset(row) for row in found.tolist()} == {frozenset([0, 2, 3])}
    np.testing.assert_allclose((found[:, 0] == 2).mean(), 0.6, atol=0.04)


def test_a_relaxed_choice_has_the_gradient_of_the_soft_one() -> None:
    def slope(x: Any) -> Any:
        return frontend.grad((F.gumbel_softmax(x, tau=0.7, hard=True) * np.arange(3)).sum(), x)

    found = run_model(export(slope, {"x": (5, 3)}), {"x": drawn((5, 3))})["output"]
    assert np.abs(found.sum(1)).max() < 1e-5 < np.abs(found).max()


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "whole numbers": (lambda x: F.randn_like(x.long()), "element type int64, but requires a floating-point type"),
    "a type": (lambda x: F.rand(3, dtype="int64"), "element type int64"),
    "whole shares": (lambda x: F.bernoulli(x.long()), "bernoulli has the element type int64"),
    "no sample": (lambda x: F.multinomial(x, 0), "at least one sample"),
    "three dimensions": (lambda x: F.multinomial(x.unsqueeze(0), 1), "weights with one or two dimensions"),
    "nothing to choose from": (lambda x: F.randint(5, 5, (2,)), "at least 1 and at most"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_drawn_is_refused(name: str) -> None:
    function, says = BAD[name]
    with pytest.raises(ModelError, match=says):
        export(function, {"x": ("rows", 2)})


# --- in training, evaluation and exports ---------------------------------------------------------------


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: Any) -> Any:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + (0.5 * log_variance).exp() * F.randn_like(mean)
        return {"decoded": self.decoder(code), "mean": mean, "log_variance": log_variance}


def evidence(out: Any, batch: Any) -> Any:
    """With noise in the loss, too."""
    mean, log_variance = out["mean"], out["log_variance"]
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
    noisy = batch["x"] + 0.1 * F.randn_like(batch["x"])
    return {"error": (F.dropout(out["decoded"], 0.1) - noisy).square().sum(1).mean(), "divergence": divergence,
            "drawn": F.rand()}  # fmt: skip


def step_of(seed: int = 0) -> gg.Step:
    frontend.manual_seed(0)
    return gg.build(export(Autoencoder(), {"x": ("rows", 6)}), evidence, gg.optim.adam(1e-2), seed=seed)


DATA = {"x": drawn((24, 6))}


@pytest.mark.sweep(0)
def test_training_and_its_figures_are_repeated_after_a_resume(tmp_path: Path) -> None:
    resumed(step_of(), DATA, tmp_path, 4, epochs=3, batch_size=8, validation=DATA)


@pytest.mark.sweep(0)
def test_steps_and_seeds_draw_other_numbers_and_an_evaluation_the_same() -> None:
    losses = []
    for seed in (0, 1):
        trainer = gg.Trainer(step_of(seed))
        evaluated = [trainer.evaluate(DATA)["loss"] for _ in range(2)]
        assert evaluated[0] == evaluated[1] == gg.Trainer(step_of(seed)).evaluate(DATA)["loss"]
        losses.append(float(trainer.step(DATA)["error"]))
    assert losses[0] != losses[1]
    drawing = {n.op_type for n in step_of().train.graph.node} & {"RandomNormalLike", "RandomUniform", "Dropout"}
    assert not drawing


def test_predictions_and_exports_draw_anew() -> None:
    trainer = gg.Trainer(step_of())
    first, second = (trainer.predict(DATA)["decoded"] for _ in range(2))
    assert np.abs(first - second).max() > 1e-3
    exported = trainer.export()
    onnx.checker.check_model(exported, full_check=True)
    assert [n.op_type for n in exported.graph.node].count("RandomNormalLike") == 1

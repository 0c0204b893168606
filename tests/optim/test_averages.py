"""Averages of weights (EMA, schedule-free), Lookahead, adaptive clipping: what they compute, and who reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph import optim
from gradgraph.errors import BuildError, ModelError
from gradgraph.export import save_inference, save_weights, weights
from gradgraph.step.manifest import Manifest
from tests.kit.optim_cases import WEIGHTS, X, Y, batches, gradients_by_hand, network
from tests.kit.running import Loop, resumed

STEPS = 50


def followed(optimizer: optim.Optimizer) -> list[dict[str, np.ndarray]]:
    """The state after each step."""
    loop, states = Loop(gg.build(network(), "mse", optimizer)), []
    for batch in batches():
        loop(batch)
        states.append(loop.state)
    return states


@pytest.mark.torch
def test_ema_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    module = torch.nn.ParameterDict({n: torch.nn.Parameter(torch.tensor(w)) for n, w in WEIGHTS.items()})
    theirs = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=average)
    for state in followed(optim.ema(optim.adamw(0.01), 0.9)):
        with torch.no_grad():
            for name in WEIGHTS:
                module[name].copy_(torch.tensor(state[name]))
        theirs.update_parameters(module)
        for name in WEIGHTS:
            expected = theirs.module[name].detach().numpy()
            np.testing.assert_allclose(state[f"{name}.ema"], expected, rtol=1e-5, atol=1e-6)


def test_ema_leaves_training_alone_and_may_warm_up() -> None:
    plain, averaged = followed(optim.adamw(0.01)), followed(optim.ema(optim.adamw(0.01), 0.99, warmup=True))
    mean = None
    for t, (state, other) in enumerate(zip(plain, averaged, strict=True)):
        assert all(np.array_equal(state[n], other[n]) for n in WEIGHTS)
        decay = 0.0 if t == 0 else min(0.99, (1 + t) / (10 + t))
        mean = state["w1"] if mean is None else decay * mean + (1 - decay) * state["w1"]
        np.testing.assert_allclose(other["w1.ema"], mean, rtol=1e-5, atol=1e-6)


def test_lookahead_follows_its_formula() -> None:
    weights_now = {n: w.astype(np.float64) for n, w in WEIGHTS.items()}
    slow, buffers = dict(weights_now), {n: np.zeros_like(w) for n, w in weights_now.items()}
    states = followed(optim.lookahead(optim.sgd(0.2, momentum=0.9), k=5, alpha=0.3))
    for t, (batch, state) in enumerate(zip(batches(), states, strict=True), start=1):
        _, grads = gradients_by_hand(weights_now, batch["x"], batch["target"])
        for n in weights_now:
            buffers[n] = 0.9 * buffers[n] + grads[n]
            weights_now[n] = weights_now[n] - 0.2 * buffers[n]
            if t % 5 == 0:
                weights_now[n] = slow[n] = slow[n] + 0.3 * (weights_now[n] - slow[n])
            np.testing.assert_allclose(state[n], weights_now[n], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_sam_follows_its_formula(adaptive: bool, accumulate: bool) -> None:
    now, buffers = {n: w.astype(np.float64) for n, w in WEIGHTS.items()}, dict.fromkeys(WEIGHTS, 0.0)
    chosen = optim.sam(optim.sgd(0.1, momentum=0.9), rho=0.2, adaptive=adaptive)
    trainer = gg.Trainer(gg.build(network(), "mse", chosen, accumulate=accumulate), device="cpu")
    for batch in batches():
        loss, grads = gradients_by_hand(now, batch["x"], batch["target"])
        scale = {n: np.abs(w) if adaptive else 1.0 for n, w in now.items()}
        norm = np.sqrt(sum(((scale[n] * g) ** 2).sum() for n, g in grads.items()))
        there = {n: w + 0.2 * scale[n] ** 2 * grads[n] / norm for n, w in now.items()}
        _, grads = gradients_by_hand(there, batch["x"], batch["target"])
        for n in now:
            buffers[n] = 0.9 * buffers[n] + grads[n]
            now[n] = now[n] - 0.1 * buffers[n]
        assert float(trainer.step(batch)["loss"]) == pytest.approx(loss, rel=1e-4)
    for n, weight in trainer.parameters.items():
        np.testing.assert_allclose(weight, now[n], rtol=1e-3, atol=1e-5)


def test_adaptive_clipping_follows_its_formula() -> None:
    clipped = gg.build(network(), "mse", optim.chain(optim.clip_by_unit_norm(0.01), optim.sgd(1.0)))
    loop = Loop(clipped)
    loop(batches()[0])
    _, grads = gradients_by_hand({n: w.astype(np.float64) for n, w in WEIGHTS.items()}, X[0], Y[0])
    for name, weight in WEIGHTS.items():
        g, axis = grads[name], 0  # of a matrix on the right of MatMul, each column is a unit
        limit = 0.01 * np.maximum(np.linalg.norm(weight, axis=axis, keepdims=True), 1e-3)
        expected = weight - g * np.minimum(limit / np.linalg.norm(g, axis=axis, keepdims=True), 1)
        np.testing.assert_allclose(loop.state[name], expected, rtol=1e-4, atol=1e-6)


AVERAGING: dict[str, tuple[optim.Optimizer, str]] = {
    "ema": (optim.ema(optim.adamw(0.05), 0.9), "ema"),
    "ema of groups": (optim.ema(optim.adamw(0.05, groups={"b*": {"lr": 0.1}}), 0.9), "ema"),
    "lookahead and ema": (optim.ema(optim.lookahead(optim.adamw(0.05), 3), 0.9), "ema"),
    "sam": (optim.ema(optim.sam(optim.adamw(0.05)), 0.9), "ema"),
    "schedule-free": (optim.schedule_free_adamw(0.05), "x"),
    "schedule-free groups": (optim.schedule_free_sgd(0.5, groups={"b*": {"lr_factor": 0.1}}), "x"),
}


@pytest.mark.sweep(0.32)
@pytest.mark.parametrize("name", AVERAGING)
def test_evaluation_prediction_and_export_read_the_average(name: str, tmp_path: Path) -> None:
    optimizer, slot = AVERAGING[name]
    step = gg.build(network(), "mse", optimizer)
    step.save(tmp_path / "step")
    assert step.manifest.averages == {n: f"{n}.{slot}" for n in WEIGHTS}
    trainer = gg.Trainer(tmp_path / "step", device="cpu")
    for batch in batches()[:10]:
        trainer.step(batch)
    trainer.save(tmp_path / "run.ckpt")
    state, held_out = trainer.state_dict(), batches()[11]
    for averaged in (True, False):
        used = {n: state[f"{n}.{slot}" if averaged else n].astype(np.float64) for n in WEIGHTS}
        loss, _ = gradients_by_hand(used, held_out["x"], held_out["target"])
        assert trainer.evaluate(held_out, averaged=averaged)["loss"] == pytest.approx(loss, rel=1e-5)
        expected = np.tanh(held_out["x"] @ used["w1"] + used["b1"]) @ used["w2"] + used["b2"]
        found = trainer.predict(held_out["x"], averaged=averaged)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        path = tmp_path / "model.onnx"
        save_inference(tmp_path / "step", path, tmp_path / "run.ckpt", averaged=averaged)
        for model in (trainer.export(averaged=averaged), onnx.load(path)):
            session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
            np.testing.assert_allclose(session.run(None, {"x": held_out["x"]})[0], found, rtol=1e-4, atol=1e-5)
        saved = save_weights(tmp_path / "step", tmp_path / "w.safetensors", tmp_path / "run.ckpt", averaged=averaged)
        assert saved.keys() == weights(step).keys()
        assert all(np.array_equal(saved[n], state[f"{n}.{slot}" if averaged else n]) for n in WEIGHTS)
    assert np.array_equal(trainer.evaluate(held_out)["loss"], trainer.evaluate(held_out, averaged=True)["loss"])
    assert trainer.evaluate(held_out) != trainer.evaluate(held_out, averaged=False)


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize("name", AVERAGING)
def test_a_resumed_run_is_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    step = gg.build(network(), "mse", AVERAGING[name][0])
    data = {"x": X[:6].reshape(-1, 4), "target": Y[:6].reshape(-1, 3)}
    resumed(step, data, tmp_path, 8, epochs=3, batch_size=16, validation=data, patience=3)


def test_validation_is_of_the_average() -> None:
    data = {"x": X[0], "target": Y[0]}
    trainer = gg.Trainer(gg.build(network(), "mse", optim.sgd(0.3), ema=0.9), device="cpu")
    history = trainer.fit(data, 3, 16, validation=data, progress=False)
    assert history["val_loss"][-1] == pytest.approx(trainer.evaluate(data)["loss"], rel=1e-6)
    assert history["val_loss"][-1] != pytest.approx(trainer.evaluate(data, averaged=False)["loss"], rel=1e-3)


def test_a_manifest_says_nothing_of_averages_that_there_are_not() -> None:
    assert "averages" not in json.loads(gg.build(network(), "mse", "adamw").manifest.to_json())
    text = gg.build(network(), "mse", "adamw", ema=0.9).manifest.to_json()
    assert Manifest.from_json(text).averages["w1"] == "w1.ema"
    for lie in ({"w1": "b1.ema"}, {"w1": "nothing"}, {"step": "w1.ema"}, {"w1.ema": "w1"}):
        with pytest.raises(ModelError, match="but it is not one"):
            Manifest.from_json(json.dumps({**json.loads(text), "averages": lie}))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: optim.ema(optim.sgd(), 1.0), r"decay must be in \[0, 1\)"),
        (lambda: optim.ema(optim.schedule_free_adamw()), "remove ema"),
        (lambda: optim.ema(optim.ema(optim.sgd())), "remove ema"),
        (lambda: optim.sam(optim.sam(optim.sgd())), "already wrapped in sam"),
        (lambda: optim.lookahead(optim.sgd(), 0), "k must be at least 1"),
        (lambda: optim.chain(optim.ema(optim.sgd()), optim.clip_by_value(1.0)), "last part of a chain"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, says: str) -> None:
    with pytest.raises(BuildError, match=says):
        gg.build(network(), "mse", make())

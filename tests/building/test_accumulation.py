"""Accumulation of gradients: any number of micro-batches is one large batch, to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph import optim
from gradgraph.errors import ArgumentError, BuildError, DataError
from tests.kit.command_line import arrays, mlp
from tests.kit.lowered_networks import batches as network_batches
from tests.kit.lowered_networks import exported
from tests.kit.optim_cases import WEIGHTS, X, Y, network
from tests.kit.running import Loop, resumed

OPTIMIZERS: dict[str, optim.Optimizer] = {
    "sgd": optim.sgd(0.2, momentum=0.9),
    "adamw, scheduled": optim.adamw(optim.cosine(0.05, 20)),
    "clipped": optim.chain(optim.clip_by_global_norm(0.1), optim.adam(0.05)),
    "groups": optim.nadam(0.05, groups={"b*": {"lr": 0.1}}, layer_decay=0.5),
    "averages": optim.ema(optim.lookahead(optim.sgd(0.2), 2), 0.9),
    "schedule-free": optim.schedule_free_adamw(0.05),
    "adafactor": optim.adafactor(0.05),
}
DATA = {"x": X[:8].reshape(-1, 4)[:100], "target": Y[:8].reshape(-1, 3)[:100]}


def after(step: gg.Step, batch_size: int, accumulate: int | None = None, **options: Any) -> dict[str, np.ndarray]:
    trainer = gg.Trainer(step, device="cpu", **options)
    trainer.fit(DATA, 3, batch_size, accumulate=accumulate, progress=False)
    return trainer.state_dict()


@pytest.mark.sweep(0.13)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_micro_batches_are_one_large_batch(name: str) -> None:
    """24 samples in micro-batches of 8 or 5, the last batch of an epoch being smaller: 100 = 4·24 + 4."""
    plain = gg.build(network(), "mse", OPTIMIZERS[name])
    step = gg.build(network(), "mse", OPTIMIZERS[name], accumulate=True)
    expected = after(plain, 24)
    for micro, every in ((8, 3), (24, 1), (3, 8)):
        found = after(step, micro, every)
        for state in plain.manifest.state:
            np.testing.assert_allclose(
                found[state.name], expected[state.name], rtol=2e-4, atol=5e-6, err_msg=state.name
            )


def test_a_step_on_its_own_says_when_to_update() -> None:
    step = gg.build(network(), "mse", optim.adamw(0.05), accumulate=True)
    trainer, large = gg.Trainer(step, device="cpu"), gg.Trainer(step, device="cpu")
    for round_ in range(5):
        rows = DATA["x"][20 * round_ : 20 * round_ + 20], DATA["target"][20 * round_ : 20 * round_ + 20]
        before = trainer.parameters["w1"]
        for begin, end in ((0, 3), (3, 11)):
            trainer.step(tuple(a[begin:end] for a in rows), update=0)
            assert np.array_equal(trainer.parameters["w1"], before)
        trainer.step(tuple(a[11:] for a in rows))
        large.step(rows)
    state, expected = trainer.state_dict(), large.state_dict()
    assert state["step"] == 5
    for name in expected:
        np.testing.assert_allclose(state[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("weighted", [False, True])
def test_labels_count_by_their_weights(weighted: bool) -> None:
    """Ignored ones for nothing, others as their class does, and as their sample does."""
    loss = gg.losses.cross_entropy(weight=[0.2, 1.0, 3.0])
    more: dict[str, Any] = {"sample_weight": True} if weighted else {}
    data = {k: v.copy() for k, v in arrays(48).items()}
    data["target"][5:14] = -100
    if weighted:
        data["sample_weight"] = np.linspace(0.1, 2.0, 48).astype(np.float32)
    states = []
    for batch_size, every in ((24, 1), (8, 3)):
        step = gg.build(mlp(), loss, optim.sgd(0.5), accumulate=True, **more)
        assert set(step.manifest.hyperparameters) == {"learning_rate", "update"}
        trainer = gg.Trainer(step, device="cpu")
        trainer.fit(data, 2, batch_size, accumulate=every, shuffle=False, progress=False)
        states.append(trainer.parameters)
    for name, value in states[0].items():
        np.testing.assert_allclose(states[1][name], value, rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_a_function_is_told_what_it_is_a_mean_over() -> None:
    def loss(out: Any, batch: Any) -> Any:
        return ((out["y"] - batch["target"]) ** 2).mean()

    targets = {"target": ("batch", 3)}
    step = gg.build(network(), loss, optim.sgd(0.2), targets=targets, accumulate=True)
    assert "batch_weight" in step.manifest.hyperparameters
    expected = after(gg.build(network(), loss, optim.sgd(0.2), targets=targets), 24)
    found = after(step, 8, 3)
    for name in WEIGHTS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_several_losses_accumulate() -> None:
    states = []
    for batch_size, every in ((24, 1), (8, 3)):
        step = gg.build(network(), {"y": ("mse", 0.5)}, optim.sgd(0.2), accumulate=True)
        trainer = gg.Trainer(step, device="cpu")
        trainer.fit({"x": DATA["x"], "y_target": DATA["target"]}, 2, batch_size, accumulate=every, progress=False)
        states.append(trainer.parameters)
    for name, value in states[0].items():
        np.testing.assert_allclose(states[1][name], value, rtol=1e-4, atol=1e-6)


def test_gradients_of_losses_that_sum_add_up() -> None:
    step = gg.build(network(), gg.losses.mse("sum"), optim.sgd(0.001), accumulate=True)
    assert set(step.manifest.hyperparameters) == {"learning_rate", "update"}
    found, expected = after(step, 8, 3), after(gg.build(network(), gg.losses.mse("sum"), optim.sgd(0.001)), 24)
    for name in WEIGHTS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "portable"])
def test_any_runtime_may_feed_it_as_an_ordinary_step(backend: str) -> None:
    step = gg.build(network(), "mse", optim.adamw(0.05), accumulate=True, backend=backend)
    ours, plain = Loop(step), Loop(gg.build(network(), "mse", optim.adamw(0.05), backend=backend))
    for i in range(3):
        for loop in (ours, plain):
            loop({"x": X[i], "target": Y[i]})
    for name in WEIGHTS:
        np.testing.assert_allclose(ours.state[name], plain.state[name], rtol=1e-5, atol=1e-7)


def test_state_may_be_written_over_in_place() -> None:
    step = gg.build(network(), "mse", optim.adamw(0.05), accumulate=True)
    expected = after(step, 8, 3)
    found = after(step, 8, 3, options=gg.RuntimeOptions(in_place=True))
    assert all(np.array_equal(found[n], expected[n]) for n in expected)


def test_master_weights_and_float16_gradients_add_up_in_float32() -> None:
    model = network()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(WEIGHTS[tensor.name].astype(np.float16), tensor.name))
    for optimizer in (optim.sgd(0.1), optim.master_weights(optim.adamw(0.01))):
        step = gg.build(model, "mse", optimizer, accumulate=True)
        assert {s.dtype for s in step.manifest.state if s.name.endswith(".accumulated")} == {"float32"}
        half = {name: value.astype(np.float16) for name, value in DATA.items()}
        trainer = gg.Trainer(step, device="cpu")
        history = trainer.fit(half, 5, 8, accumulate=3, progress=False)
        assert history["loss"][-1] < history["loss"][0]


@pytest.mark.sweep(0.33)
@pytest.mark.parametrize("stop", [7, 8, 9])
def test_a_run_resumed_within_a_group_is_the_same_to_the_bit(stop: int, tmp_path: Path) -> None:
    step = gg.build(network(), "mse", OPTIMIZERS["averages"], accumulate=True)
    resumed(step, DATA, tmp_path, stop, epochs=3, batch_size=8, accumulate=3)


def test_a_step_that_does_not_accumulate_says_so() -> None:
    trainer = gg.Trainer(gg.build(network(), "mse", "sgd"), device="cpu")
    with pytest.raises(BuildError, match=r"updates the weights after each batch; build it with gradgraph.build"):
        trainer.fit(DATA, accumulate=2, progress=False)
    with pytest.raises((ArgumentError, DataError)):
        trainer.fit(DATA, accumulate=0, progress=False)


def test_a_value_called_update_is_named() -> None:
    model = network()
    model.graph.input[0].name = "update"
    model.graph.node[0].input[0] = "update"
    with pytest.raises(
        BuildError,
        match="the model has a value called 'update', which is the name of an input for gradient accumulation",
    ):
        gg.build(model, "mse", "sgd", accumulate=True)


@pytest.mark.sweep(0)
@pytest.mark.parametrize("name", ["residual", "transformer", "lstm"])
def test_networks_of_every_kind_take_the_same_steps(name: str) -> None:
    """In a branch, as accumulation has them, and with gradients of a second pass, as SAM has them."""
    ways: list[tuple[optim.Optimizer, dict[str, Any]]] = [
        (optim.adamw(1e-3), {}), (optim.adamw(1e-3), {"accumulate": True}), (optim.sam(optim.adamw(1e-3), rho=0.0), {}),
    ]  # fmt: skip
    states = []
    for optimizer, more in ways:
        trainer = gg.Trainer(gg.build(exported(name, "batch"), "cross_entropy", optimizer, **more), device="cpu")
        losses = [float(trainer.step(batch)["loss"]) for batch in network_batches(name, 3, 3)]
        states.append(losses)
    for found in states[1:]:
        np.testing.assert_allclose(found, states[0], rtol=1e-5)

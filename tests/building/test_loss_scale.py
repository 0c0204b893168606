"""The loss scale of float16: when it moves, what an overflow leaves alone, where it is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, numpy_helper

import gradgraph as gg
from gradgraph import optim
from tests.kit.optim_cases import BATCHES, X, Y, network
from tests.kit.running import run
from tests.kit.small_models import parsed

TOO_LARGE = {"x": X[0], "target": Y[0] + np.float32(1e6)}  # a loss of 1e12, whose scaled gradient float16 cannot hold
OPTIMIZERS: dict[str, tuple[optim.Optimizer, dict[str, Any]]] = {
    "sgd": (optim.sgd(0.1, momentum=0.9), {}),
    "adamw, scheduled": (optim.adamw(optim.cosine(0.05, 20)), {}),
    "clipped": (optim.chain(optim.clip_by_global_norm(0.1), optim.adam(0.05)), {}),
    "groups": (optim.adamw(0.05, groups={"b*": {"lr": 0.1}}, no_decay="norm_and_bias"), {}),
    "averages": (optim.lookahead(optim.sgd(0.1), 2), {"ema": 0.9}),
    "schedule-free": (optim.schedule_free_adamw(0.05), {}),
    "uphill": (optim.sam(optim.sgd(0.1)), {}),
    "accumulating": (optim.adamw(0.05), {"accumulate": True}),
}


def trainer_of(step: gg.Step) -> gg.Trainer:
    return gg.Trainer(step, device="cpu")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_changes_no_bit_but_those_of_the_scale(name: str) -> None:
    optimizer, more = OPTIMIZERS[name]
    trainer = trainer_of(gg.build(network(), "mse", optimizer, precision="float16", **more))
    for batch in BATCHES[:3]:
        trainer.step(batch)
    before = trainer.state_dict()
    assert before["loss_scale"] == 2.0**16 and before["loss_scale_good_steps"] == 3 and before["skipped_steps"] == 0
    assert np.isfinite(trainer.step(TOO_LARGE)["loss"])
    after = trainer.state_dict()
    assert after.pop("loss_scale") == 2.0**15
    assert (after.pop("loss_scale_good_steps"), after.pop("skipped_steps")) == (0, 1)
    assert all(np.array_equal(value, before[n]) for n, value in after.items())
    trainer.step(BATCHES[3])
    moved = trainer.state_dict()
    assert moved["loss_scale_good_steps"] == 1 and not np.array_equal(moved["w1"], before["w1"])


def test_the_scale_grows_after_steps_in_a_row() -> None:
    precision = gg.Precision("float16", init_scale=64.0, growth_interval=3, growth_factor=4.0, backoff_factor=0.25)
    trainer = trainer_of(gg.build(network(), "mse", optim.sgd(0.01), precision=precision))
    seen = []
    for batch in (*BATCHES[:4], TOO_LARGE, *BATCHES[:3]):
        trainer.step(batch)
        state = trainer.state_dict()
        seen.append((float(state["loss_scale"]), int(state["loss_scale_good_steps"])))
    assert seen == [(64, 1), (64, 2), (256, 0), (256, 1), (64, 0), (64, 1), (64, 2), (256, 0)]


def test_a_scale_that_is_a_power_of_two_changes_no_bit_where_nothing_vanishes() -> None:
    """In float16 with normal numbers: scaled by 2 or by 2048 the weights are the same."""
    states = []
    for scale in (2.0, 2048.0):
        precision = gg.Precision("float16", init_scale=scale)
        trainer = trainer_of(gg.build(network(), "mse", optim.sgd(0.1), precision=precision))
        for batch in BATCHES[:5]:
            trainer.step(batch)
        states.append(trainer.parameters)
    for name, value in states[0].items():
        np.testing.assert_allclose(states[1][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scaled", [True, False])
def test_small_gradients_vanish_unless_they_are_scaled(scaled: bool) -> None:
    """Of 1e-8 and less, where float16 ends at 6e-8; Adam does not mind how small a gradient is."""
    precision = gg.Precision("float16", scaled=scaled)
    model = parsed(
        "(float[n, 4] x) => (float[n, 3] y) { y = MatMul(x, w) }", w=np.random.default_rng(0).normal(size=(4, 3))
    )
    optimizer = optim.adam(0.05, eps=1e-20)
    trainer = trainer_of(gg.build(model, {"y": ("mse", 1e-8)}, optimizer, precision=precision))
    data = {"x": X[0], "y_target": Y[0]}
    before, losses = trainer.parameters["w"], [float(trainer.step(data)["loss"]) for _ in range(20)]
    if scaled:
        assert losses[-1] < 0.8 * losses[0]
    else:
        assert np.array_equal(trainer.parameters["w"], before)


def test_infinite_numbers_in_one_micro_batch_skip_the_update_of_all() -> None:
    trainer = trainer_of(gg.build(network(), "mse", optim.adam(0.05), precision="float16", accumulate=True))
    trainer.step(BATCHES[0])
    before = trainer.state_dict()
    trainer.step(BATCHES[1], update=0)
    trainer.step(TOO_LARGE, update=0)
    between = trainer.state_dict()
    assert between["loss_scale"] == 2.0**16 and not np.isfinite(between["w2.accumulated"]).all()
    trainer.step(BATCHES[2])
    after = trainer.state_dict()
    assert after["loss_scale"] == 2.0**15 and after["skipped_steps"] == 1 and after["step"] == before["step"]
    assert np.array_equal(after["w1"], before["w1"]) and not after["w2.accumulated"].any()
    trainer.step(BATCHES[3], update=0)
    trainer.step(BATCHES[4])
    assert trainer.state_dict()["step"] == before["step"] + 1


def test_micro_batches_are_one_large_batch() -> None:
    x, y = X[0][:20], Y[0][:20]
    small, large = (
        trainer_of(gg.build(network(), "mse", optim.adam(0.05), precision="float16", accumulate=True)) for _ in range(2)
    )
    for _ in range(3):
        small.step({"x": x[:8], "target": y[:8]}, update=0)
        small.step({"x": x[8:], "target": y[8:]})
        large.step({"x": x, "target": y})
    for name, value in large.parameters.items():
        np.testing.assert_allclose(small.parameters[name], value, rtol=1e-2, atol=2e-3)


def test_a_float16_model_with_master_weights_is_scaled_too() -> None:
    half = onnx.ModelProto()
    text = "(float16[n, 4] x) => (float16[n, 3] y) <float16 two = {16384}> { m = MatMul(x, w)  y = Mul(m, two) }"
    half.CopyFrom(parsed(text))
    half.graph.initializer.append(numpy_helper.from_array(np.ones((4, 3), np.float16), "w"))
    step = gg.build(half, "mse", optim.master_weights(optim.adamw(0.01)), precision="float16")
    trainer = trainer_of(step)
    batch = {"x": X[0].astype(np.float16), "target": Y[0].astype(np.float16)}
    losses = [float(trainer.step(batch)["loss"]) for _ in range(20)]
    state = trainer.state_dict()
    assert losses[-1] < losses[0] and state["w.master"].dtype == np.float32
    assert state["loss_scale"] <= 2.0**15  # a loss in float16 cannot be multiplied by 2^16
    exported = trainer.export()  # as the model that was built
    assert {t.data_type for t in exported.graph.initializer} == {TensorProto.FLOAT16}
    assert run(exported, {"x": batch["x"]})["y"].dtype == np.float16


def test_a_name_that_the_model_has_is_left_to_it() -> None:
    model = parsed("(float[n, 4] x) => (float[n, 3] y) { y = MatMul(x, loss_scale) }", loss_scale=np.ones((4, 3)))
    precision = gg.Precision("float16", init_scale=256.0)
    trainer = trainer_of(gg.build(model, "mse", optim.sgd(0.1), precision=precision))
    history = trainer.fit({"x": X[0], "target": Y[0]}, 1, 8, progress=False)
    assert history["loss_scale"] == [256.0] and trainer.parameters["loss_scale"].shape == (4, 3)


def test_a_scale_that_falls_for_ever_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(gg.build(network(), "mse", optim.sgd(0.1), precision=gg.Precision("float16", init_scale=4.0)))
    bad = {"x": X[0], "target": Y[0] + np.float32(1e12)}
    trainer.fit([bad] * 3, 3, progress=False)
    said = [r.message for r in caplog.records if "gradients are NaN or infinite at any scale" in r.message]
    assert len(said) == 1


def test_history_and_logs_have_the_scale(tmp_path: Path) -> None:
    step = gg.build(network(), "mse", optim.sgd(0.1), precision="float16")
    history = trainer_of(step).fit([BATCHES[0], TOO_LARGE, BATCHES[1]], 2, log=tmp_path / "log.jsonl", log_every=1,
                                   progress=False)  # fmt: skip
    assert history["loss_scale"] == [2.0**15, 2.0**14] and history["skipped_steps"] == [1, 2]
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["loss_scale"] for r in records if r["event"] == "step"][:3] == [2.0**16, 2.0**15, 2.0**15]
    plain = trainer_of(gg.build(network(), "mse", precision="bfloat16")).fit(BATCHES[:2], progress=False)
    assert "loss_scale" not in plain


def test_several_steps_have_a_scale_each() -> None:
    """One overflows and is skipped; the other one goes on."""
    step = gg.build(
        network(),
        steps={
            "first": gg.StepOptions("mse", optim.sgd(0.05), train=["w1", "b1"]),
            "last": gg.StepOptions("mse", optim.adam(0.01), train=["w2", "b2"]),
        },
        precision="float16",
    )
    trainer = trainer_of(step)
    trainer.step("first", BATCHES[0])
    before = trainer.state_dict()
    trainer.step("last", TOO_LARGE)
    between = trainer.state_dict()
    assert {n for n, v in between.items() if not np.array_equal(v, before[n])} == {
        "last.loss_scale", "last.skipped_steps",
    }  # fmt: skip
    trainer.step("last", BATCHES[1])
    after = trainer.state_dict()
    assert not np.array_equal(after["w2"], before["w2"]) and np.array_equal(after["w1"], before["w1"])
    history = trainer.fit({"x": X[0], "target": Y[0]}, 1, 8, progress=False)
    assert history["first.loss_scale"] == [2.0**16] and history["last.loss_scale"] == [2.0**15]
    assert history["last.skipped_steps"] == [1]


def test_the_norm_of_the_gradient_is_without_the_scale() -> None:
    norms = [
        float(trainer_of(gg.build(network(), "mse", precision=p, grad_norm=True)).step(BATCHES[0])["grad_norm"])
        for p in ("float32", "float16")
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)

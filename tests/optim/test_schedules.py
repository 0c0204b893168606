"""Schedules in the graph against their formulas, and against torch.optim.lr_scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph import optim
from gradgraph.errors import ArgumentError, BuildError
from gradgraph.optim.schedules import SCHEDULES, rates_end
from tests.kit.optim_cases import network
from tests.kit.running import Loop

STEPS = 50


def rates(schedule: optim.Schedule, steps: int = STEPS) -> np.ndarray:
    """What a step with plain descent along gradients of 1 moves by."""
    loop = Loop(gg.build(line(), None, optim.sgd(schedule)))
    before, moved = 0.0, []
    for _ in range(steps):
        loop({"x": np.ones((1, 2), np.float32)})
        moved.append(before - float(loop.state["w"][0, 0]))
        before = float(loop.state["w"][0, 0])
    return np.array(moved)


def line() -> Any:
    """``y = x·w``, whose gradient by w is x."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("ReduceSum", ["p"], ["y"], keepdims=0)],
        "line",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(np.zeros((2, 1), np.float32), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def one_cycle_by_hand(s: int) -> float:
    low, peak, last = 0.4 / 25, 0.3 * 40 - 1, 39
    a, b, share = (low, 0.4, s / peak) if s <= peak else (0.4, low / 1e4, min((s - peak) / (last - peak), 1))
    return b + (a - b) / 2 * (1 + math.cos(math.pi * share))


def restarts_by_hand(s: int) -> float:
    length = 4
    while s >= length:
        s, length = s - length, 2 * length
    return 0.1 + 0.3 * (1 + math.cos(math.pi * s / length)) / 2


FORMULAS: dict[str, tuple[optim.Schedule, Callable[[int], float]]] = {
    "multi_step": (optim.multi_step(0.4, [5, 20, 30], 0.5), lambda s: 0.4 * 0.5 ** sum(s >= m for m in (5, 20, 30))),
    "polynomial": (optim.polynomial(0.4, 40, 2.0, 0.1), lambda s: 0.1 + 0.3 * (1 - min(s / 40, 1)) ** 2),
    "cosine_restarts": (optim.cosine_restarts(0.4, 4, 2, 0.1), restarts_by_hand),
    "cosine_restarts-equal": (
        optim.cosine_restarts(0.4, 7), lambda s: 0.2 * (1 + math.cos(math.pi * (s % 7) / 7))
    ),
    "one_cycle": (optim.one_cycle(0.4, 40), one_cycle_by_hand),
    "inverse_square_root": (
        optim.inverse_square_root(0.4, 10), lambda s: 0.4 * min(s / 10, math.sqrt(10 / max(s, 1)))
    ),
    "sequential": (
        optim.sequential([optim.constant(0.1), optim.linear(0.4, 10), optim.constant(0.05)], [5, 20]),
        lambda s: 0.1 if s < 5 else 0.4 * (1 - min((s - 5) / 10, 1)) if s < 20 else 0.05,
    ),
    "function": (optim.function(lambda s: 0.4 / (1 + s) if s % 3 else 0.2, 30),
                 lambda s: 0.4 / (1 + min(s, 29)) if min(s, 29) % 3 else 0.2),
    "constant": (optim.constant(0.1), lambda s: 0.1),
    "linear": (optim.linear(0.4, 20, 0.1), lambda s: 0.4 - 0.3 * min(s / 20, 1)),
    "cosine": (optim.cosine(0.4, 40), lambda s: 0.2 * (1 + math.cos(math.pi * min(s, 40) / 40))),
    "exponential": (optim.exponential(0.4, 0.9), lambda s: 0.4 * 0.9**s),
    "step_decay": (optim.step_decay(0.4, 7, 0.5), lambda s: 0.4 * 0.5 ** (s // 7)),
    "warmup": (optim.warmup(5, optim.cosine(0.4, 40)),
               lambda s: 0.4 * s / 5 if s < 5 else 0.2 * (1 + math.cos(math.pi * min(s - 5, 40) / 40))),
}  # fmt: skip


def test_every_schedule_has_a_formula() -> None:
    assert {schedule.name for schedule, _ in FORMULAS.values()} == set(SCHEDULES) - {"reduce_on_plateau"}


@pytest.mark.parametrize("name", FORMULAS)
def test_schedules_follow_their_formula_for_50_steps(name: str) -> None:
    schedule, formula = FORMULAS[name]
    np.testing.assert_allclose(rates(schedule), [formula(s) for s in range(STEPS)], rtol=1e-4, atol=2e-6)


TORCH: dict[str, tuple[optim.Schedule, str, dict[str, Any]]] = {
    "multi_step": (optim.multi_step(0.4, [5, 20]), "MultiStepLR", {"milestones": [5, 20]}),
    "step_decay": (optim.step_decay(0.4, 7), "StepLR", {"step_size": 7}),
    "polynomial": (optim.polynomial(0.4, 40, 2.0), "PolynomialLR", {"total_iters": 40, "power": 2.0}),
    "cosine_restarts": (
        optim.cosine_restarts(0.4, 4, 3, 0.1), "CosineAnnealingWarmRestarts", {"T_0": 4, "T_mult": 3, "eta_min": 0.1}
    ),
    "one_cycle": (optim.one_cycle(0.4, 50), "OneCycleLR", {"max_lr": 0.4, "total_steps": 50}),
    "one_cycle-three": (
        optim.one_cycle(0.4, 50, three_phase=True, anneal_strategy="linear"), "OneCycleLR",
        {"max_lr": 0.4, "total_steps": 50, "three_phase": True, "anneal_strategy": "linear"},
    ),
    "exponential": (optim.exponential(0.4, 0.9), "ExponentialLR", {"gamma": 0.9}),
    "function": (optim.function(lambda s: 0.4 * 0.95**s, 50), "LambdaLR", {"lr_lambda": lambda s: 0.95**s}),
}  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("name", TORCH)
def test_schedules_are_those_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    ours, kind, arguments = TORCH[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    theirs = getattr(torch.optim.lr_scheduler, kind)(optimizer, **arguments)
    expected = []
    for _ in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    np.testing.assert_allclose(rates(ours), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: optim.multi_step(0.1, [20, 5]), "milestones must be increasing numbers of steps"),
        (lambda: optim.sequential([optim.constant(0.1)], [5]), "1 schedules need 0 milestones, not 1"),
        (lambda: optim.one_cycle(0.1, 2), "cannot rise and fall within"),
        (lambda: optim.one_cycle(0.1, 100, anneal_strategy="cosine"), "cos or linear"),
        (lambda: optim.cosine_restarts(0.1, 10, 0), "whole numbers of at least 1"),
        (lambda: optim.function(lambda s: math.inf, 10), "returns inf for step 0"),
        (lambda: optim.function(lambda s: None, 10), "the result of the schedule for step 0 is None"),
        (lambda: optim.function(lambda s: 0.1, 10**9), "total_steps must be between"),
        (lambda: optim.polynomial(0.1, 10, power=0), "power must be above zero"),
        (lambda: optim.inverse_square_root(0.1, 0), "warmup_steps must be at least 1"),
    ],
)  # fmt: skip
def test_schedules_that_make_no_sense_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises((BuildError, ArgumentError), match=says):
        make()


def test_a_schedule_works_with_every_kind_of_network_weight() -> None:
    step = gg.build(network(), "mse", optim.adamw(optim.one_cycle(0.01, 50)))
    assert step.manifest.hyperparameters == {}
    assert step.manifest.optimizer["arguments"]["lr"]["schedule"] == "one_cycle"


# --- what has ended -------------------------------------------------------------------------------------------

ENDING: list[tuple[optim.Schedule, int | None]] = [
    (optim.constant(0.1), None),
    (optim.linear(0.1, 7), 7),
    (optim.linear(0.1, 7, 0.01), None),
    (optim.cosine(0.1, 9), 9),
    (optim.cosine(0.1, 9, 0.01), None),
    (optim.exponential(0.1, 0.9), None),
    (optim.step_decay(0.1, 3, 0.5), None),
    (optim.multi_step(0.1, [3, 5]), None),
    (optim.polynomial(0.1, 8, 2.0), 8),
    (optim.polynomial(0.1, 8, 2.0, 0.01), None),
    (optim.cosine_restarts(0.1, 5), None),
    (optim.one_cycle(0.1, 20, final_div_factor=10.0), None),
    (optim.inverse_square_root(0.1, 4), None),
    (optim.warmup(4, optim.linear(0.1, 5)), 9),
    (optim.warmup(4, optim.constant(0.1)), None),
    (optim.sequential([optim.constant(0.1), optim.cosine(0.1, 6)], [5]), 11),
    (optim.sequential([optim.linear(0.1, 2), optim.constant(0.1)], [5]), None),
    (optim.linear(0.1, 7).scaled(0.5), 7),
    (optim.function(lambda s: max(0.5 - 0.1 * s, 0.0) if s != 5 else 0.0, 12), 5),
    (optim.function(lambda s: 0.1, 12), None),
]


def ends(optimizer: optim.Optimizer) -> float | None:
    return rates_end(gg.build(line(), None, optimizer).manifest.optimizer)


def test_these_are_all_schedules() -> None:
    assert {schedule.name for schedule, _ in ENDING} == {*SCHEDULES.keys(), "scaled"} - {"reduce_on_plateau"}


@pytest.mark.parametrize(("schedule", "end"), ENDING, ids=lambda value: getattr(value, "name", str(value)))
def test_the_end_of_a_schedule_is_where_its_rates_are(schedule: optim.Schedule, end: int | None) -> None:
    """The formula in words against the numbers: 0 from there on, and not before."""
    given = rates(schedule, 24)
    moving = np.flatnonzero(given)
    if end is None:
        assert given[-1] != 0.0
    else:
        assert moving[-1] == end - 1
    assert ends(optim.sgd(schedule)) == end


@pytest.mark.parametrize("how", ["step", "fit", "accumulate", "resumed"])
def test_training_at_rate_0_is_said_once(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = gg.build(line(), None, optim.sgd(optim.linear(0.1, 6)), accumulate=how == "accumulate")
    trainer, x = gg.Trainer(step, device="cpu"), {"x": np.ones((6, 2), np.float32)}

    def train(count: int) -> int:
        """Do so many updates; returns how often it was said."""
        caplog.clear()
        if how == "accumulate":
            trainer.fit(x, count // 3, 1, accumulate=2, progress=False)
        elif how == "step":
            for _ in range(count):
                trainer.step({"x": x["x"][:1]})
        else:
            trainer.fit(x, count // 6, 1, progress=False)
        return sum("the learning rate schedule ended after" in message for message in caplog.messages)

    assert train(6) == 0
    if how == "resumed":
        trainer.save(tmp_path / "run.ckpt")
        trainer = gg.Trainer.resume(step, tmp_path / "run.ckpt")
        trainer.progress.fit_epoch = trainer.progress.epoch
    assert train(12) == 1
    assert "ended after 6 updates: the rate is now 0" in caplog.text
    assert train(12) == 0


def test_a_rate_that_somebody_sets_says_nothing() -> None:
    assert ends(optim.sgd(optim.linear(0.1, 6), groups={"w": {"lr": 0.1}})) == 6
    assert ends(optim.sgd(optim.linear(0.1, 6), groups={"w": optim.adamw(0.1)})) is None
    assert ends(optim.sgd(optim.linear(0.1, 6), groups={"w": {"lr": optim.linear(0.1, 9)}})) == 9
    assert ends(optim.sgd(optim.linear(0.1, 6), groups={"w": {"start": 3}})) is None
    assert ends(optim.ema(optim.adamw(optim.cosine(0.1, 6)), 0.9)) == 6
    assert ends(optim.sgd(0.1)) is None
    for damaged in ({"schedule": "linear"}, {"schedule": "sequential", "schedules": [], "milestones": []}, [1, None]):
        assert rates_end({"name": "sgd", "arguments": {"lr": damaged}}) is None


def test_a_fit_that_is_longer_than_its_schedule_says_so_before_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    x = {"x": np.ones((6, 2), np.float32)}
    for arguments, last in [({"epochs": 1}, None), ({"epochs": 3}, 18), ({"epochs": 3, "max_steps": 9}, None),
                            ({"epochs": 3, "max_steps": 11}, 11), ({"epochs": 3, "accumulate": 2}, None),
                            ({"epochs": 4, "accumulate": 2}, 12)]:  # fmt: skip
        caplog.clear()
        step = gg.build(line(), None, optim.sgd(optim.linear(0.1, 9)), accumulate=True)
        gg.Trainer(step, device="cpu").fit(x, batch_size=1, progress=False, **arguments)
        said = [message for message in caplog.messages if "schedule" in message]
        assert len(said) == (last is not None), arguments
        assert last is None or f"ends after 9 updates, but this fit makes {last}" in said[0]


@pytest.mark.parametrize(
    ("rate", "says"),
    [
        (lambda s: 0.1 if s < 3 else 0.0, ["returned 0 after 4 steps, so the weights no longer change"]),
        (lambda s: 0.1 * s, []),
        (lambda s: 0.1 * abs(s - 3), []),
        (optim.reduce_on_plateau(0.1), []),
        (0.0, []),
    ],
)
def test_a_function_that_gives_odd_rates_is_told_of_once(
    rate: Any, says: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = gg.Trainer(gg.build(line(), None, "sgd"), device="cpu")
    trainer.fit({"x": np.ones((8, 2), np.float32)}, 2, 1, learning_rate=rate, progress=False)
    said = [message for message in caplog.messages if "learning_rate" in message]
    assert said == [f"the function of learning_rate {text}" for text in says]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -0.1, True, "0.1", [0.1]])
@pytest.mark.parametrize("how", ["fit", "overfit"])
def test_a_function_that_gives_no_rate_is_refused(value: Any, how: str) -> None:
    trainer = gg.Trainer(gg.build(line(), None, "sgd"), device="cpu")
    with pytest.raises(
        gg.errors.DataError, match=r"the function of learning_rate returned .* after 2 steps; it should"
    ):
        call = getattr(trainer, how)
        call({"x": np.ones((8, 2), np.float32)}, batch_size=1, learning_rate=lambda s: 0.1 if s < 2 else value,
             **({"progress": False} if how == "fit" else {}))  # fmt: skip

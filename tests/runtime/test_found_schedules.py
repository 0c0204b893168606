"""``find_lr`` with every schedule, with accumulation and without, of many optimizers: a schedule rests meanwhile, a
step is an update, and all is as it was afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph import optim
from gradgraph.backends import step_backends
from gradgraph.errors import BuildError, GradgraphError
from gradgraph.optim.weight_groups import RECIPES
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.loop.trials import RateCurve
from gradgraph.runtime.saved.checkpoint import checkpoint_pieces
from tests.kit.optim_cases import network
from tests.optim.test_schedules import FORMULAS

pytestmark = pytest.mark.any_kernels

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
DATA = {"x": X, "target": np.tanh(X @ RNG.normal(size=(4, 3)).astype(np.float32))}
ACCUMULATE = pytest.mark.parametrize("accumulate", [None, 3], ids=["each batch", "every third batch"])


def trainer(optimizer: Any, accumulate: int | None = None, options: Any = None, **built: Any) -> gg.Trainer:
    step = gg.build(network(), "mse", optimizer, accumulate=bool(accumulate), **built)
    return gg.Trainer(step, device="cpu", options=RuntimeOptions(threads=1, **(options or {})))


def found(t: gg.Trainer, accumulate: int | None = None, **more: Any) -> RateCurve:
    return t.find_lr(DATA, 8, steps=8, start=1e-4, end=1.0, accumulate=accumulate, **more)


def image(t: gg.Trainer) -> bytes:
    return b"".join(checkpoint_pieces(t.state_dict(), t.progress))


@pytest.mark.sweep(0.17)
@ACCUMULATE
@pytest.mark.parametrize("name", FORMULAS)
def test_a_schedule_rests(name: str, accumulate: int | None) -> None:
    """The curve has the bits of a step whose rate is fed, and the schedule stands where it stood."""
    t = trainer(optim.adamw(FORMULAS[name][0]), accumulate)
    before = image(t)
    assert found(t, accumulate) == found(trainer(optim.adamw(0.01), accumulate), accumulate)
    assert image(t) == before


def with_groups(rate: Any) -> Any:
    return optim.adamw(rate, groups={"b*": {"lr_factor": 3.0}}, layer_decay=0.5, no_decay="norm_and_bias")


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    name: lambda rate, name=name: optim.by_name(name, lr=rate)
    for name, make in RECIPES.items()
    if "lr" in inspect.signature(make).parameters and name not in ("muon", "rprop")
} | {
    "muon": lambda rate: optim.muon(rate, groups={"b*": optim.adamw(rate)}),
    "groups": with_groups,
    "a group that begins late": lambda rate: optim.sgd(rate, momentum=0.9, groups={"b*": {"start": 4}}),
    "averages": lambda rate: optim.ema(with_groups(rate), 0.9),
    "lookahead": lambda rate: optim.lookahead(optim.sgd(rate), 2),
    "sam": lambda rate: optim.sam(optim.sgd(rate, momentum=0.9)),
    "clipped": lambda rate: optim.chain(optim.clip_by_global_norm(0.1), optim.adam(rate)),
    "master weights": lambda rate: optim.master_weights(optim.adamw(rate)),
}  # fmt: skip


@pytest.mark.sweep(0.03)
@ACCUMULATE
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_tried_the_same_with_a_schedule(name: str, accumulate: int | None) -> None:
    make = OPTIMIZERS[name]
    expected = found(trainer(make(0.01), accumulate), accumulate)
    for schedule in (optim.constant(0.02), optim.warmup(3, optim.cosine(0.4, 20))):
        t = trainer(make(schedule), accumulate)
        before = image(t)
        assert found(t, accumulate) == expected
        assert image(t) == before


def accumulated(t: gg.Trainer, batches: int, every: int) -> Any:
    t.fit(DATA, 2, 8, accumulate=every, max_steps=batches, progress=False)


@pytest.mark.sweep(0.03)
@pytest.mark.parametrize("rate", [0.01, optim.constant(0.01), optim.cosine(0.01, 5)], ids=["fed", "constant", "moving"])
@pytest.mark.parametrize("options", [{"native_kernels": False}, {"in_place": True}, {}], ids=["stock", "in place", ""])
@pytest.mark.parametrize("batches", [0, 4], ids=["new", "in the middle of an update"])
def test_a_run_goes_on_as_if_nothing_had_been_tried(rate: Any, options: dict[str, bool], batches: int) -> None:
    """Weights, slots, sums of an update that is not finished, counters, masks, order and names are as they were."""
    built = {"ema": 0.9}
    tried, plain = (trainer(with_groups(rate), 3, options, **built) for _ in range(2))
    for t in (tried, plain):
        if batches:
            accumulated(t, batches, 3)
    before = image(tried)
    found(tried, 3)
    assert image(tried) == before
    for t in (tried, plain):
        t.fit(DATA, 2, 8, accumulate=3, resume=bool(batches), progress=False)
    assert image(tried) == image(plain)


@pytest.mark.sweep(0.25)
@pytest.mark.parametrize("backend", step_backends())
@pytest.mark.parametrize("name", ["constant", "cosine"])
def test_on_every_backend(backend: str, name: str) -> None:
    try:
        t = trainer(optim.sgd(FORMULAS[name][0]), backend=backend)
    except GradgraphError as error:
        pytest.skip(f"this step is not for it, or not here: {error}")
    assert found(t).suggestion == pytest.approx(found(trainer(optim.sgd(0.1))).suggestion, rel=1e-3)


def test_an_update_of_three_batches_is_one_of_all_their_samples() -> None:
    small = trainer(optim.sgd(optim.constant(0.1)), 3).find_lr(DATA, 4, steps=12, start=1e-3, accumulate=3)
    large = trainer(optim.sgd(0.1)).find_lr(DATA, 12, steps=12, start=1e-3)
    np.testing.assert_allclose(small.losses, large.losses, rtol=1e-5)
    np.testing.assert_allclose([r for r, _ in small.tried], [r for r, _ in large.tried], rtol=1e-6)


def test_a_last_smaller_update_belongs_to_its_epoch() -> None:
    """60 samples in batches of 8 are 8; every third one moves the weights, and the last one, as in ``fit``."""
    curve = trainer(optim.sgd(0.0), 3).find_lr(DATA, 8, steps=6, start=1e-30, end=1e-29, accumulate=3)
    assert len(curve.losses) == 6
    t = trainer(optim.sgd(1e-30), 3)
    means = []
    for epoch in range(2):
        source = t.prepare(DATA, 8)
        losses = [float(t.step(b, update=0)["loss"]) for b in source.batches(epoch)]
        sizes = [8] * 7 + [4]
        means += [np.average(losses[i : i + 3], weights=sizes[i : i + 3]) for i in (0, 3, 6)]
    np.testing.assert_allclose(curve.losses, means, rtol=1e-6)


def test_a_folder_of_a_step(tmp_path: Path) -> None:
    step = gg.build(network(), "mse", optim.adamw(optim.constant(0.01)), accumulate=True)
    step.save(tmp_path / "step")
    assert found(gg.Trainer(tmp_path / "step", device="cpu", options=RuntimeOptions(threads=1)), 3) == found(
        trainer(optim.adamw(0.01), 3), 3
    )


def test_adapters() -> None:
    model = gg.lora(network(), "w*", rank=2, seed=0)
    fed, scheduled = (gg.Trainer(gg.build(model, "mse", optim.adamw(rate)), device="cpu")
                      for rate in (0.01, optim.constant(0.3)))  # fmt: skip
    assert found(fed) == found(scheduled)


def test_a_group_with_a_schedule_of_its_own_follows_it() -> None:
    own = {"b*": {"lr": optim.constant(0.05)}}
    t = trainer(optim.sgd(optim.cosine(0.1, 9), groups=own))
    assert found(t) == found(trainer(optim.sgd(0.1, groups=own)))
    assert found(t) != found(trainer(optim.sgd(0.1)))


def test_beside_a_rate_that_is_fed_a_schedule_goes_on() -> None:
    """The suggestion is for the one that is fed."""
    fed = trainer(optim.sgd(optim.constant(0.05), groups={"b*": optim.sgd(0.1)}))
    assert found(fed) == found(trainer(optim.sgd(0.1, groups={"w*": {"lr": optim.constant(0.05)}})))


@pytest.mark.parametrize(
    ("optimizer", "more", "says"),
    [
        (
            optim.sgd(optim.constant(0.1), groups={"*": {"lr": optim.constant(0.2)}}),
            {},
            "no weight of this step",
        ),
        (optim.chain(optim.clip_by_value(1.0)), {}, "its optimizer has none"),
        (optim.rprop(0.1), {}, "its optimizer has none"),  # a number that its first step alone reads
        (optim.sgd(0.1), {"accumulate": 3}, "updates the weights after each batch"),
        (optim.sgd(0.1), {"accumulate": 0}, "accumulate"),
    ],
)
def test_refusals(optimizer: Any, more: dict[str, Any], says: str) -> None:
    t = trainer(optimizer)
    with pytest.raises((BuildError, gg.errors.DataError), match=says):
        t.find_lr(DATA, steps=4, **more)
    t.fit(DATA, 1, progress=False)  # it is as good as before


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    t = trainer(optim.sgd(0.1))
    monkeypatch.setattr(type(t._session.team), "ranks", 2)
    with pytest.raises(BuildError, match="find_lr does not support several ranks"):
        found(t)

"""Several named steps over one state: fits by a pattern, resuming, and trials."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.errors import (
    ArgumentError,
    BuildError,
    CheckpointError,
    DataError,
    DivergedError,
    UnknownNameError,
)
from gradgraph.runtime.loop.pattern import Pattern
from gradgraph.step.step import Step
from tests.kit.gan_steps import (
    IMAGES,
    LABELLED,
    gan_step,
    same,
    two_heads,
)


@pytest.fixture(scope="module")
def gan() -> Step:
    return gan_step()


@pytest.mark.sweep(0)
def test_a_fit_trains_all_steps_on_each_batch(gan: Step) -> None:
    seen = []

    class Watch:
        def on_step(self, trainer: gg.Trainer, results: Mapping[str, Any]) -> None:
            seen.append(list(results))

    trainer, by_hand = gg.Trainer(gan, seed=3), gg.Trainer(gan, seed=3)
    pattern = {
        "steps": ["discriminator", "discriminator", "generator"],
        "every": {"generator": 2},
        "learning_rate": {"discriminator": lambda done: 1e-3 / (1 + done)},
    }
    history = trainer.fit(
        IMAGES, epochs=2, batch_size=32, shuffle=False, callbacks=[Watch()], progress=False, **pattern
    )  # type: ignore[arg-type]
    losses: dict[str, list[float]] = {"discriminator": [], "generator": []}
    for number in range(6):  # the third batch of an epoch is of 6 samples
        batch = {"image": IMAGES["image"][32 * (number % 3) :][:32]}
        for name in ["discriminator"] * 2 + ["generator"] * (number % 2):
            rates = {"learning_rate": 1e-3 / (1 + by_hand.progress.counts.get(name, 0))} if name[0] == "d" else {}
            losses[name] += [float(by_hand.step(name, batch, **rates)["loss"])] * len(batch["image"])
    same(trainer, by_hand)
    assert history["step"] == [7, 15]
    assert history["discriminator.learning_rate"] == [1e-3 / 6, 1e-3 / 12]  # of the last step
    assert trainer.progress.counts == {"discriminator": 12, "generator": 3}
    assert history["discriminator.loss"][0] == pytest.approx(np.mean(losses["discriminator"][:140]))
    assert history["generator.loss"][0] == pytest.approx(np.mean(losses["generator"][:32]))
    assert history["generator.loss"][1] == pytest.approx(np.mean(losses["generator"][32:]))
    d = [f"discriminator.{name}" for name in ("loss", "real", "made")]
    assert seen == [d, [*d, "generator.loss", "generator.grad_norm", "generator.learning_rate"]] * 3


@pytest.mark.sweep(0.41)
@pytest.mark.parametrize("stop", [2, 9])
def test_a_resumed_fit_is_the_same_to_the_bit(gan: Step, stop: int, tmp_path: Path) -> None:
    """Dropout, noise, a schedule, a rate by function, an average, a pattern; stopped where ``stop`` steps are done."""
    arguments: dict[str, Any] = {
        "epochs": 3, "batch_size": 16, "every": {"generator": 2}, "progress": False, "validation": IMAGES,
        "learning_rate": {"discriminator": lambda n: 1e-3 / (1 + n)},
    }  # fmt: skip
    whole = gg.Trainer(gan, seed=5)
    rows = whole.fit(IMAGES, **arguments)
    gg.Trainer(gan, seed=5).fit(IMAGES, **arguments, max_steps=stop, checkpoint=tmp_path / "run.ckpt")
    again = gg.Trainer.resume(gan, tmp_path / "run.ckpt")
    assert again.fit(IMAGES, **arguments) == rows
    same(whole, again)
    assert again.progress.counts == whole.progress.counts


@pytest.mark.sweep(0)
def test_a_batch_that_was_begun_is_finished_after_a_resume(gan: Step, tmp_path: Path) -> None:
    """The generator's loss is not finite: what is saved stands behind the discriminator's part of the batch."""
    trainer, whole = gg.Trainer(gan), gg.Trainer(gan)
    arguments: dict[str, Any] = {"epochs": 2, "batch_size": 32, "progress": False}
    whole.fit(IMAGES, **arguments)
    session = trainer._session
    train, calls = session.train, []

    def failing(*given: Any) -> Any:
        calls.append(given[2].name)
        if len(calls) == 4:
            raise DivergedError("the loss became nan in step 4", {}, {}, "generator")
        return train(*given)

    session.train = failing  # type: ignore[method-assign]
    with pytest.raises(DivergedError, match=r"batch 1 of epoch 1.*resume from .* to repeat this batch"):
        trainer.fit(IMAGES, checkpoint=tmp_path / "run.ckpt", **arguments)
    assert calls[-2:] == ["discriminator", "generator"]
    again = gg.Trainer.resume(gan, tmp_path / "run.diverged.ckpt")
    assert (again.progress.place, again.progress.batch) == (1, 1)
    again.fit(IMAGES, **arguments)
    same(whole, again)
    with pytest.raises(DataError, match="fit with the same steps and every"):
        gg.Trainer.resume(gan, tmp_path / "run.diverged.ckpt").fit(IMAGES, steps="generator", **arguments)


def test_some_steps_of_all_need_their_own_data_only() -> None:
    both = {
        "left": gg.StepOptions("cross_entropy", gg.optim.sgd(0.1), output="left", train="a.*"),
        "right": gg.StepOptions("mse", gg.optim.sgd(0.1), output="right", train="b.*", target_name="numbers"),
    }
    trainer = gg.Trainer(gg.build(two_heads(), steps=both))
    history = trainer.fit(LABELLED, steps="left", batch_size=10, progress=False)
    assert list(history) == ["epoch", "step", "left.loss", "left.accuracy", "left.learning_rate"]
    everything = {**LABELLED, "numbers": np.zeros((40, 2), np.float32)}
    trainer.fit(everything, steps="left", batch_size=10, progress=False)
    trainer.fit([everything], steps="left", progress=False)
    prepared = trainer.prepare(everything, batch_size=10)
    history = trainer.fit(
        prepared, batch_size=10, progress=False, validation=prepared, patience=1, monitor="val_right.loss"
    )
    assert "val_right.loss" in history
    with pytest.raises(DataError, match="'numbers' is missing"):
        trainer.fit(LABELLED, batch_size=10, progress=False)


def test_logs_have_the_columns_and_rates_of_each_step(gan: Step, tmp_path: Path) -> None:
    gg.Trainer(gan).fit(IMAGES, batch_size=16, log=tmp_path / "log.jsonl", log_every=3, progress=False)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [4, 6, 10, 10]
    assert {"discriminator.loss", "generator.loss", "discriminator.learning_rate"} <= records[0].keys()


def test_the_pattern() -> None:
    pattern = Pattern(("d", "g", "d"), {"g": 3})
    due = [pattern.on(n) for n in range(12)]
    assert due[:3] == [["d", "d"], ["d", "d"], ["d", "g", "d"]]
    for start in range(5):
        for stop in range(start, 12):
            assert pattern.runs("g", start, stop) == sum(names.count("g") for names in due[start:stop])
            assert pattern.runs("d", start, stop) == sum(names.count("d") for names in due[start:stop])


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda t: t.step(IMAGES), BuildError, "has several steps ('discriminator', 'generator'); name one of them"),
        (
            lambda t: t.step("generater", IMAGES),
            UnknownNameError,
            "there is no step 'generater'; did you mean 'generator'",
        ),
        (lambda t: t.step(3, IMAGES), ArgumentError, "the name of a step is 3; it should be text"),
        (lambda t: t.step("generator", {"x": 1}), DataError, "the step has no input 'x'"),
        (lambda t: t.step("generator", IMAGES, learning_rate=1.0), UnknownNameError, "has no hyperparameter"),
        (lambda t: t.fit(IMAGES, steps="gan"), UnknownNameError, "there is no step 'gan'"),
        (lambda t: t.fit(IMAGES, every={"generator": 0}), DataError, "should be a whole number above zero"),
        (
            lambda t: t.fit(IMAGES, steps="generator", every={"generator": 2}),
            DataError,
            "no step trains on every batch",
        ),
        (
            lambda t: t.fit(IMAGES, steps="generator", every={"discriminator": 2}),
            DataError,
            "which this fit does not train",
        ),
        (
            lambda t: t.fit(IMAGES, learning_rate=0.1),
            BuildError,
            "a single learning_rate was given, but each step has its own",
        ),
        (lambda t: t.fit(IMAGES, learning_rate={"generator": 0.1}), UnknownNameError, "has no hyperparameter"),
        (lambda t: t.fit(IMAGES, learning_rate={"gan": 0.1}), DataError, "has a value for the step 'gan'"),
        (lambda t: t.fit(IMAGES, accumulate=2), BuildError, "updates the weights after each batch"),
        (lambda t: t.find_lr(IMAGES), BuildError, "find_lr needs one step"),
        (lambda t: t.overfit(IMAGES), BuildError, "overfit needs one step"),
        (lambda t: t.find_lr(IMAGES, step="gan"), UnknownNameError, "there is no step 'gan'"),
        (lambda t: t.overfit(IMAGES, step="generator", learning_rate=0.1), UnknownNameError, "no hyperparameter"),
        (lambda t: t.fit(IMAGES, patience=1, monitor="loss"), DataError, "no column 'loss'"),
        (lambda t: t.fit(IMAGES, patience=1), DataError, "no column 'loss'"),
        (
            lambda t: t.fit(IMAGES, callbacks=[gg.CheckpointKeeper("kept")]),
            CheckpointError,
            "monitor='discriminator.loss'",
        ),
    ],
)
def test_what_a_trainer_refuses(gan: Step, call: Any, error: type[Exception], says: str) -> None:
    trainer = gg.Trainer(gan)
    with pytest.raises(error) as raised:
        call(trainer)
    assert says in str(raised.value)
    assert trainer.progress.steps == 0


@pytest.mark.sweep(0)
@pytest.mark.parametrize("prepared", [False, True])
def test_one_of_several_is_tried_and_all_is_as_it_was(gan: Step, prepared: bool) -> None:
    trainer, plain = gg.Trainer(gan, device="cpu"), gg.Trainer(gan, device="cpu")
    for each in (trainer, plain):
        each.fit(IMAGES, epochs=1, batch_size=20, progress=False)
    data = trainer.prepare(IMAGES, 20) if prepared else IMAGES
    curve = trainer.find_lr(data, None if prepared else 20, step="discriminator", steps=12)
    assert len(curve.rates) == 12 and len(set(curve.losses)) == 12
    scheduled = trainer.find_lr(data, None if prepared else 20, step="generator", steps=12)  # in the graph
    assert len(scheduled.rates) == 12 and len(set(scheduled.losses)) == 12
    found = trainer.overfit(data, None if prepared else 20, step="discriminator", steps=60, learning_rate=0.05)
    assert found.losses[-1] < found.losses[0]
    assert len(trainer.overfit(IMAGES, step="generator", steps=3).losses) == 3
    for each in (trainer, plain):
        each.fit(IMAGES, epochs=1, batch_size=20, progress=False)
    same(trainer, plain)
    assert trainer.progress == plain.progress

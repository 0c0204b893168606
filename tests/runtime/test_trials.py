"""Trials leave all as it was, and say something that is true."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.errors import DataError, DivergedError, GradgraphError, RuntimeUnavailableError
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.loop.trials import RateCurve
from gradgraph.runtime.saved.checkpoint import checkpoint_pieces
from gradgraph.runtime.saved.history import History

pytestmark = pytest.mark.any_kernels

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 3, 200)
DATA = {"x": (RNG.normal(size=(200, 4)) + 3 * np.eye(3, 4)[LABELS]).astype(np.float32), "target": LABELS}


def trainer(rate: Any = 1e-3, **options: Any) -> gg.Trainer:
    net = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[batch, 4] x) => (float[batch, 3] logits) {
            m = MatMul (x, w1)
            h = Relu (m)
            d = Dropout (h)
            logits = MatMul (d, w2)
        }""")
    rng = np.random.default_rng(1)
    for name, shape in {"w1": (4, 16), "w2": (16, 3)}.items():
        values = rng.normal(size=shape, scale=0.3).astype(np.float32)
        net.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    step = gg.build(net, optimizer=gg.optim.adamw(rate), ema=0.9)
    return gg.Trainer(step, device="cpu", options=RuntimeOptions(threads=1, **options))


def image(t: gg.Trainer) -> bytes:
    return b"".join(checkpoint_pieces(t.state_dict(), t.progress))


TRIALS: dict[str, Callable[[gg.Trainer], Any]] = {
    "find_lr": lambda t: t.find_lr(DATA, batch_size=20, steps=15),
    "find_lr_of_a_schedule": lambda t: trainer(gg.optim.cosine(1e-3, 99)).find_lr(DATA, batch_size=20, steps=15),
    "find_lr_blows_up": lambda t: t.find_lr(DATA, start=1.0, end=1e30, steps=30),
    "overfit": lambda t: t.overfit(DATA, steps=5),
    "find_batch_size": lambda t: t.find_batch_size(DATA),
    "profile": lambda t: t.profile({k: v[:20] for k, v in DATA.items()}, steps=3),
    "overfit_diverges": lambda t: diverges(t),
}


def diverges(t: gg.Trainer) -> None:
    with pytest.raises(DivergedError):
        t.overfit({**DATA, "x": DATA["x"] * np.float32(1e30)}, steps=9, learning_rate=1e30)


@pytest.mark.sweep(0.06)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize("steps", [0, 3])
def test_nothing_is_changed(name: str, steps: int, in_place: bool) -> None:
    """What is trained afterwards has the bits of a run without the trial: masks, averages and sessions too."""
    tried, plain = trainer(in_place=in_place), trainer(in_place=in_place)
    for t in (tried, plain):
        if steps:
            t.fit(DATA, epochs=2, batch_size=32, max_steps=steps, progress=False)
    before = image(tried)
    TRIALS[name](tried)
    assert image(tried) == before
    for t in (tried, plain):
        t.fit(DATA, epochs=2, batch_size=32, resume=bool(steps), progress=False)
    assert image(tried) == image(plain)


@pytest.mark.sweep(0)
def test_a_rate_that_trains() -> None:
    t = trainer()
    curve = t.find_lr(DATA, batch_size=32, steps=80)
    assert curve.suggestion is not None
    assert 1e-4 < curve.suggestion < 1.0
    assert len(curve.rates) == len(curve.losses) == len(curve.smoothed) <= 80
    assert curve.rates[0] == pytest.approx(1e-7)
    assert curve.steepest is not None and f"falls fastest at {curve.steepest:.2g}" in str(curve)
    lowest = min(dict(curve.tried), key=dict(curve.tried).__getitem__)
    assert lowest / 3 < curve.suggestion < lowest * 3 and f"lowest near {curve.suggestion:.2g}" in str(curve)
    before = t.evaluate(DATA)["loss"]
    t.fit(DATA, epochs=3, learning_rate=curve.suggestion, progress=False)
    assert t.evaluate(DATA)["loss"] < 0.5 * before


def test_no_rate_that_trains() -> None:
    curve = trainer().find_lr(DATA, start=1e-12, end=1e-11, steps=2)
    assert curve.suggestion is None
    assert "none lowers the loss" in str(curve)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda t: t.find_lr(DATA, start=1.0, end=0.1),
            DataError,
            "should be positive learning rates, with start below end",
        ),
        (lambda t: t.find_lr(DATA, start=0.0), DataError, "should be positive learning rates, with start below end"),
        (lambda t: t.find_lr(DATA, steps=0), DataError, "steps"),
        (lambda t: t.find_lr({"x": DATA["x"]}), DataError, "target"),
        (lambda t: t.overfit(DATA, momentum=0.5), GradgraphError, "momentum"),
        (lambda t: t.overfit(iter(())), DataError, "no batch"),
    ],
)
def test_refusals(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call(trainer())


def test_one_batch_learnt_by_heart() -> None:
    t = trainer()
    found = t.overfit(DATA, batch_size=8, steps=150, learning_rate=0.05)
    assert found.learned
    assert "can memorize the batch" in str(found)
    assert not t.overfit(DATA, steps=3, learning_rate=1e-6).learned
    still = t.overfit(DATA, steps=2, learning_rate=lambda step: 0.0 * step)
    assert "should fall" in str(still) or "stays at" in str(still)


@pytest.mark.sweep(0)
def test_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curve = RateCurve((0.1, 0.2), (1.0, 0.5), (1.0, 0.7), 0.2, ((0.1, 0.6), (0.3, np.inf)), 0.1)
    history = History({"epoch": [1.0, 2.0], "step": [5.0, 9.0], "loss": [2.0, 1.0], "val_<accuracy>": [0.5, 0.25]})
    for name, plot in (("curve.png", curve.plot), ("history.svg", history.plot)):
        assert len(plot().axes) == 1 + (name == "history.svg")
        plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
        with pytest.raises(DataError, match=r"use \.png"):
            plot(tmp_path / "plot.doc")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeUnavailableError, match="pip install matplotlib"):
        curve.plot()


def test_a_history_in_a_notebook() -> None:
    history = History({"epoch": [1.0, 2.0], "val_<accuracy>": [0.5, 0.25]})
    history.restored = 0
    assert history._repr_html_() == (
        "<table><thead><tr><th>epoch</th><th>val_&lt;accuracy&gt;</th></tr></thead><tbody>"
        '<tr style="font-weight: bold"><td>1</td><td>0.5</td></tr><tr><td>2</td><td>0.25</td></tr></tbody></table>'
    )


@pytest.mark.parametrize(
    "rate", [0.01, lambda step: 0.01, gg.optim.reduce_on_plateau(0.01)], ids=["a number", "a function", "a plateau"]
)
def test_a_batch_is_learnt_at_any_kind_of_rate(rate: Any) -> None:
    assert trainer().overfit(DATA, steps=30, learning_rate=rate).losses == (
        trainer(0.01).overfit(DATA, steps=30).losses
    )

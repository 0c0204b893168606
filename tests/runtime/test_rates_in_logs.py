"""The learning rate stands in history, logs and progress lines: fed, or of a schedule in the graph."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.frontend import export, nn
from gradgraph.graph.builder import Builder
from gradgraph.optim.schedules import SCHEDULES

LABELS = np.random.default_rng(0).integers(0, 3, 80)
DATA = {"x": np.eye(4, dtype=np.float32)[LABELS], "target": LABELS}  # 5 batches an epoch
ARGUMENTS: dict[str, Callable[[], Any]] = {
    "constant": lambda: gg.optim.constant(0.03),
    "cosine": lambda: gg.optim.cosine(0.1, 12),
    "cosine_restarts": lambda: gg.optim.cosine_restarts(0.1, 3, 2),
    "exponential": lambda: gg.optim.exponential(0.1, 0.9),
    "function": lambda: gg.optim.function(lambda s: 0.1 / (1 + s), 20),
    "inverse_square_root": lambda: gg.optim.inverse_square_root(0.1, 4),
    "linear": lambda: gg.optim.linear(0.1, 12),
    "multi_step": lambda: gg.optim.multi_step(0.1, [3, 7]),
    "one_cycle": lambda: gg.optim.one_cycle(0.1, 14),
    "polynomial": lambda: gg.optim.polynomial(0.1, 12, 2.0),
    "sequential": lambda: gg.optim.sequential([gg.optim.constant(0.01), gg.optim.linear(0.1, 8)], [4]),
    "step_decay": lambda: gg.optim.step_decay(0.1, 4),
    "warmup": lambda: gg.optim.warmup(4, gg.optim.cosine(0.1, 9)),
}


def model() -> Any:
    gg.frontend.manual_seed(0)
    return export(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), {"x": ("batch", 4)})


def expected(schedule: Any, updates: int) -> float:
    """The rate of the last of so many updates, by running the schedule's own nodes."""
    op = Builder()
    s = op.wrap(ir.Value(name="s", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([])))
    rate = op.Identity(schedule.emit(op, s))
    graph = ir.Graph([s.value], [rate.value], nodes=[], opset_imports={"": 21})
    op.finish(graph)
    session = ort.InferenceSession(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString())
    return float(session.run(None, {"s": np.array(updates - 1, np.float32)})[0])


def test_every_schedule_is_tried() -> None:
    assert ARGUMENTS.keys() == {name for name in SCHEDULES if name != "reduce_on_plateau"}


@pytest.mark.sweep(0.4)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_schedule_in_the_graph_is_logged(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = ARGUMENTS[name]()
    trainer = gg.Trainer(gg.build(model(), optimizer=gg.optim.sgd(schedule)), device="cpu")
    logs = [tmp_path / "log.jsonl", tmp_path / "log.csv"]
    history = trainer.fit(DATA, epochs=2, batch_size=16, log=logs, log_every=3)
    rates = {step: pytest.approx(expected(schedule, step), rel=1e-6, abs=1e-12) for step in range(1, 11)}
    assert history["learning_rate"] == [rates[5], rates[10]]
    rows = [json.loads(line) for line in logs[0].read_text().splitlines()]
    assert [r["learning_rate"] for r in rows] == [rates[r["step"]] for r in rows] and len(rows) == 5
    with logs[1].open() as file:
        table = list(csv.DictReader(file))
    assert [float(r["learning_rate"]) for r in table] == [rates[int(r["step"])] for r in table] and len(table) == 5
    assert f"lr {history['learning_rate'][1]:.4g}" in capsys.readouterr().err


@pytest.mark.parametrize("in_graph", [True, False])
def test_it_is_that_of_the_last_step(in_graph: bool) -> None:
    """A function that is fed is logged as the same function in the graph is."""
    rate = lambda step: 0.1 / (1 + step)  # noqa: E731
    given = gg.optim.function(rate, 50) if in_graph else 0.1
    trainer = gg.Trainer(gg.build(model(), optimizer=gg.optim.adamw(given)), device="cpu")
    fed = {} if in_graph else {"learning_rate": rate}
    history = trainer.fit(DATA, epochs=2, batch_size=16, progress=False, **fed)
    assert history["learning_rate"] == pytest.approx([rate(4), rate(9)], rel=1e-6)


def test_a_default_is_logged_too() -> None:
    trainer = gg.Trainer(gg.build(model(), optimizer=gg.optim.adamw(2e-3)), device="cpu")
    assert trainer.fit(DATA, progress=False)["learning_rate"] == pytest.approx([2e-3])


GROUPS = {"*bias": {"weight_decay": 0.0, "lr_factor": 10}, "2.*": {"lr": 3e-3}}


@pytest.mark.sweep(0.6)
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": lambda lr: gg.optim.adamw(lr, groups=GROUPS)},
        {"optimizer": lambda lr: gg.optim.adamw(lr, groups={"*": {"lr_factor": 0.5}})},
        {"optimizer": lambda lr: gg.optim.adamw(lr, groups={"*bias": {"lr": gg.optim.linear(1.0, 99)}})},
        {"optimizer": lambda lr: gg.optim.sam(gg.optim.sgd(lr), 0.05)},
        {"optimizer": lambda lr: gg.optim.lookahead(gg.optim.adam(lr))},
        {"optimizer": lambda lr: gg.optim.schedule_free_adamw(lr)},
        {"optimizer": lambda lr: gg.optim.lars(lr)},
        {"optimizer": gg.optim.adamw, "ema": 0.9},
        {"optimizer": gg.optim.sgd, "grad_norm": True},
    ],
)
def test_it_is_that_of_the_base(options: dict[str, Any]) -> None:
    schedule = gg.optim.warmup(4, gg.optim.cosine(0.01, 9))
    step = gg.build(model(), **(options | {"optimizer": options["optimizer"](schedule)}))
    history = gg.Trainer(step, device="cpu").fit(DATA, epochs=2, batch_size=16, progress=False)
    wanted = [expected(schedule, 5), expected(schedule, 10)]
    assert history["learning_rate"] == pytest.approx(wanted, rel=1e-6)


def test_of_gradients_that_add_up_it_is_that_of_the_next_update() -> None:
    schedule = gg.optim.linear(0.1, 20)
    step = gg.build(model(), optimizer=gg.optim.adamw(schedule), accumulate=True)
    history = gg.Trainer(step, device="cpu").fit(DATA, epochs=2, batch_size=16, accumulate=2, progress=False)
    assert history["learning_rate"] == pytest.approx([expected(schedule, 3), expected(schedule, 6)], rel=1e-6)


def test_training_does_not_change_by_it(tmp_path: Path) -> None:
    """A resumed run with a schedule has the bits of one run, rates and rows included."""
    step = gg.build(model(), optimizer=gg.optim.adamw(gg.optim.cosine(0.05, 10)))
    whole, first = gg.Trainer(step, device="cpu"), gg.Trainer(step, device="cpu")
    history = whole.fit(DATA, epochs=2, batch_size=16, progress=False)
    first.fit(DATA, epochs=2, batch_size=16, progress=False, max_steps=7, checkpoint=tmp_path / "run.ckpt")
    again = gg.Trainer.resume(step, tmp_path / "run.ckpt", device="cpu")
    assert again.fit(DATA, epochs=2, batch_size=16, progress=False) == history
    for name, value in again.state_dict().items():
        np.testing.assert_array_equal(value, whole.state_dict()[name])

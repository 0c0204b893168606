"""The norm of the gradient beside the loss: exact, before clipping, for every optimizer; in histories, logs, shell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import gradgraph as gg
from gradgraph import optim
from gradgraph.cli.app import run as command
from gradgraph.step.manifest import Manifest
from tests.kit.command_line import arrays, mlp
from tests.kit.lowered_networks import batches, exported
from tests.kit.running import Loop, resumed, run

DATA = arrays(48)
OPTIMIZERS: dict[str, optim.Optimizer] = {
    "sgd, whose rate is in the backward pass otherwise": optim.sgd(0.1),
    "clipped": optim.chain(optim.clip_by_global_norm(1e-3), optim.sgd(0.1, momentum=0.9)),
    "groups": optim.adamw(1e-3, groups={"first.*": {"lr": 1e-2}}),
    "averaged": optim.ema(optim.adamw(1e-3), 0.9),
    "scheduled": optim.adamw(optim.cosine(1e-3, 10)),
}


def norm_of(model: onnx.ModelProto, feeds: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> float:
    """The norm of the gradient of the cross entropy at these weights."""
    evaluated = gg.build(model, "cross_entropy").eval
    names = list(weights)
    found = run(gg.value_and_grad(evaluated, output="loss", wrt=names), {**feeds, **weights})
    return float(np.sqrt(sum((found[f"{n}.grad"].astype(np.float64) ** 2).sum() for n in names)))


def weights_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_that_of_the_gradient(name: str) -> None:
    model = mlp()
    step = gg.build(model, "cross_entropy", OPTIMIZERS[name], grad_norm=True)
    plain = gg.build(model, "cross_entropy", OPTIMIZERS[name])
    loop, without = Loop(step), Loop(plain)
    for i in range(3):
        batch = {k: v[16 * i : 16 * i + 16] for k, v in DATA.items()}
        weights = {s.name: loop.state[s.name] for s in step.manifest.state if s.kind == "parameter"}
        found = loop(batch)
        assert found["grad_norm"] == pytest.approx(norm_of(model, batch, weights), rel=1e-5)
        assert found["loss"] == pytest.approx(without(batch)["loss"], rel=1e-6)
    for state in plain.manifest.state:
        np.testing.assert_allclose(loop.state[state.name], without.state[state.name], rtol=1e-5, atol=1e-7)


def test_where_gradients_accumulate_it_is_that_of_their_mean() -> None:
    model = mlp()
    trainer = gg.Trainer(gg.build(model, "cross_entropy", "sgd", accumulate=True, grad_norm=True), device="cpu")
    weights = weights_of(model)
    for i in range(3):
        batch = {k: v[16 * i : 16 * i + 16] for k, v in DATA.items()}
        sofar = {k: v[: 16 * i + 16] for k, v in DATA.items()}
        found = trainer.step(batch, update=float(i == 2))
        assert found["grad_norm"] == pytest.approx(norm_of(model, sofar, weights), rel=1e-5)
    following = trainer.step(batch, update=0.0)  # begins anew
    now = {k: v for k, v in trainer.state_dict().items() if k in weights}
    assert following["grad_norm"] == pytest.approx(norm_of(model, batch, now), rel=1e-5)


def test_in_float16_it_does_not_overflow() -> None:
    """The same gradient in float16, whose squares are added up in float32."""
    model = mlp()
    narrow = onnx.ModelProto()
    narrow.CopyFrom(model)
    for tensor in narrow.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*narrow.graph.input, *narrow.graph.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    batch = {"x": 3000 * DATA["x"].astype(np.float16), "target": DATA["target"]}
    found = Loop(gg.build(narrow, "cross_entropy", "sgd", grad_norm=True))(batch)["grad_norm"]
    assert found.dtype == np.float32
    assert found > 300  # of which the square is beyond float16
    wide = {"x": batch["x"].astype(np.float32), "target": DATA["target"]}
    assert found == pytest.approx(norm_of(model, wide, weights_of(model)), rel=0.05)


@pytest.mark.sweep(0.78)
@pytest.mark.parametrize("backend", ["portable", "ort-cpu"])
def test_on_networks_and_backends(backend: str) -> None:
    step = gg.build(exported("residual", "batch"), "cross_entropy", "adamw", grad_norm=True, backend=backend)
    trainer = gg.Trainer(step, device="cpu")
    (batch,) = batches("residual", 3, 1)
    plain = gg.Trainer(gg.build(exported("residual", "batch"), "cross_entropy", "adamw"), device="cpu")
    found = trainer.step(batch)
    assert found["grad_norm"] > 0
    assert found["loss"] == pytest.approx(float(plain.step(batch)["loss"]), rel=1e-5)


def test_a_step_without_it_is_as_before() -> None:
    """Byte by byte, and so is its manifest."""
    a, b = gg.build(mlp(), "cross_entropy", "adamw"), gg.build(mlp(), "cross_entropy", "adamw", grad_norm=False)
    assert a.train == b.train
    assert "reports" not in a.manifest.to_json()
    with_norm = gg.build(mlp(), "cross_entropy", "adamw", grad_norm=True).manifest
    assert Manifest.from_json(with_norm.to_json()) == with_norm
    assert with_norm.reports == ("grad_norm",)


def test_history_logs_and_monitor(tmp_path: Path) -> None:
    step = gg.build(mlp(), "cross_entropy", "adamw", grad_norm=True)
    step.save(tmp_path / "step")
    trainer = gg.Trainer(tmp_path / "step", device="cpu")
    history = trainer.fit(DATA, 2, 8, validation=DATA, progress=False, log=tmp_path / "run.jsonl", log_every=1,
                          monitor="grad_norm", mode="min", patience=5)  # fmt: skip
    records = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    steps = [r["grad_norm"] for r in records if r["event"] == "step" and r["epoch"] == 1]
    assert history["grad_norm"][0] == pytest.approx(np.mean(steps), rel=1e-6)
    assert "val_grad_norm" not in history
    assert "grad_norm" not in trainer.evaluate(DATA)


def test_a_run_with_it_resumes_to_the_bit(tmp_path: Path) -> None:
    step = gg.build(mlp(), "cross_entropy", "adamw", grad_norm=True)
    assert "grad_norm" in resumed(step, DATA, tmp_path, 8, epochs=3, batch_size=8)[1]


def test_a_model_that_has_the_name() -> None:
    model = mlp()
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = "grad_norm"
    step = gg.build(model, "cross_entropy", "sgd", grad_norm=True)
    assert step.manifest.reports == ("grad_norm_1",)
    assert Loop(step)(DATA)["grad_norm_1"] > 0


def test_from_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **DATA)
    words: list[Any] = [
        "train",
        tmp_path / "model.onnx",
        "--data",
        tmp_path / "train.npz",
        "--epochs",
        1,
        "--grad-norm",
    ]
    assert command([*map(str, words), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["history"]["grad_norm"][0] > 0

"""The trainer against the same mathematics in NumPy, and against the graphs it runs."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
import gradgraph.step.step
from gradgraph.data.arrays.numpy_files import load_arrays
from gradgraph.data.sources import sources as data_module
from gradgraph.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    ModelError,
    RuntimeUnavailableError,
    UnknownNameError,
)
from gradgraph.runtime.execution import session
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.trainer import Trainer
from gradgraph.step import folder as step_folder
from gradgraph.step.step import Step
from tests.kit import handmade
from tests.kit.lowered_networks import exported

QUIET = RuntimeOptions(threads=1)


def trainer(step: Step | Path | None = None, **options: object) -> Trainer:
    return Trainer(step or handmade.classifier(), device="cpu", options=QUIET, **options)  # type: ignore[arg-type]


def linear_data(n: int = 40, features: int = 3) -> dict[str, np.ndarray]:
    x = np.random.default_rng(1).normal(size=(n, features)).astype(np.float32)
    return {"x": x, "t": (x @ np.arange(1, features + 1, dtype=np.float32)[:, None])}


def test_step_follows_numpy() -> None:
    t = trainer(handmade.regression())
    data = linear_data()
    w = np.linspace(-1, 1, 3)[:, None]
    for i in range(5):
        residual = data["x"] @ w - data["t"]
        found = t.step(data, learning_rate=0.1 / (i + 1))
        assert found["loss"] == pytest.approx(np.mean(residual**2), rel=1e-5)
        w -= 0.1 / (i + 1) * 2 * data["x"].T @ residual / len(residual)
        np.testing.assert_allclose(t.parameters["w"], w, rtol=1e-5)
    assert t.progress.steps == 5
    assert t.progress.hyperparameters == {"learning_rate": 0.1 / 5}


def test_a_maximum_sees_padded_zeros(tmp_path: Path) -> None:
    """Onnxruntime itself loses them: it takes the padding of MaxPool for that of Pad."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N, 1, 3, 3] x) => (float[N, 9] y) <float[9, 9] w> { '
        "p = Constant<value_ints=[0, 0, 1, 1, 0, 0, 1, 1]>()  h = Pad(x, p)  m = MaxPool<kernel_shape=[3, 3]>(h)  "
        "f = Flatten(m)  y = MatMul(f, w) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(9, dtype=np.float32), "w"))
    x = -np.arange(1, 10, dtype=np.float32).reshape(1, 1, 3, 3)
    maxima = np.zeros((1, 9), np.float32)
    maxima[0, 4] = -1.0  # only the window in the middle lies inside
    t = trainer(gg.build(model, "mse", gg.optim.sgd(lr=0.0)))
    assert t.step({"x": x, "target": maxima + 1})["loss"] == 1.0
    np.testing.assert_array_equal(t.predict({"x": x}), maxima)
    t.export(tmp_path / "model.onnx")
    exported = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(exported.run(None, {"x": x})[0], maxima)


def test_step_equals_a_plain_loop_over_the_models() -> None:
    """The ping-pong gives what feeding the outputs back by hand gives, but for the rounding of another form."""
    step = handmade.classifier()
    t = trainer(step)
    options = QUIET.session_options()
    train = ort.InferenceSession(step.train.SerializeToString(), options, providers=["CPUExecutionProvider"])
    init = ort.InferenceSession(step.init.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in step.init.graph.output]
    state = dict(zip(names, init.run(None, {}), strict=True))
    rates = {"learning_rate": np.float32(0.1), "momentum": np.float32(0.9)}
    for i in range(7):
        batch = handmade.points(16, seed=i)
        feeds = {**batch, **{k: np.array(v) for k, v in rates.items()}, **state}
        loss, *after = train.run(["loss", *(f"{n}.next" for n in names)], feeds)
        state = dict(zip(names, after, strict=True))
        np.testing.assert_allclose(t.step(batch)["loss"], loss, rtol=1e-6)
    for name, value in t.state_dict().items():
        np.testing.assert_allclose(value, state[name], rtol=1e-6, atol=1e-7, err_msg=name)
    assert state["count"] == 7


def test_batches_may_change_their_size() -> None:
    t = trainer()
    for n in (16, 5, 16, 1, 32):
        assert np.isfinite(t.step(handmade.points(n))["loss"])


def test_ortvalues_and_dlpack_are_taken() -> None:
    plain, wrapped = trainer(), trainer()
    batch = handmade.points(8)

    class Tensor:
        """Speaks DLPack and nothing else."""

        def __init__(self, array: np.ndarray, device: tuple[int, int]) -> None:
            self.array, self.device = array, device

        def __dlpack__(self, **options: object) -> object:
            return self.array.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.device

    other = {
        "x": ort.OrtValue.ortvalue_from_numpy(batch["x"]),
        "z": Tensor(batch["z"], (1, 0)),
        "target": batch["target"].tolist(),
    }
    on_device = {**batch, "z": Tensor(batch["z"], (2, 0))}  # claims to lie on a GPU: onnxruntime takes it, not NumPy
    assert wrapped.step(other)["loss"] == plain.step(batch)["loss"]
    assert wrapped.step((batch["x"], batch["z"], batch["target"]))["loss"] == plain.step(batch)["loss"]
    if hasattr(ort.OrtValue, "from_dlpack"):  # since onnxruntime 1.24; older ones refuse in a sentence
        assert wrapped.step(on_device)["loss"] == plain.step(batch)["loss"]


@pytest.mark.torch
def test_torch_tensors_and_loaders_are_taken() -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch's own data types")
    data = handmade.points(20)
    tensors = [torch.from_numpy(data[n]) for n in ("x", "z", "target")]
    dataset = torch.utils.data.TensorDataset(*tensors)
    loader = torch.utils.data.DataLoader(dataset, batch_size=8)
    runs = [trainer() for _ in range(3)]
    runs[0].fit(data, batch_size=8, shuffle=False, progress=False, epochs=2)
    runs[1].fit(loader, progress=False, epochs=2)
    runs[2].fit(dataset, batch_size=8, shuffle=False, progress=False, epochs=2)
    for other in runs[1:]:
        for name, value in runs[0].state_dict().items():
            assert np.array_equal(value, other.state_dict()[name]), name


def test_fit_learns_and_reports(capsys: pytest.CaptureFixture[str]) -> None:
    t = trainer()
    history = t.fit(handmade.points(200), epochs=6, batch_size=16, validation=handmade.points(50, seed=9))
    assert history["epoch"] == [1, 2, 3, 4, 5, 6]
    assert history["step"][-1] == 6 * 13 == t.progress.steps
    assert history["val_accuracy"][-1] > 0.9
    assert history["val_loss"][-1] < history["val_loss"][0]
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 6
    assert re.match(r"epoch 1/6: step 13  loss [\d.]+  accuracy [\d.]+  val_loss .* \d:\d\d left$", errors[0])
    assert errors[-1].startswith("epoch 6/6: step 78") and "left" not in errors[-1]


def test_data_are_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, read = handmade.points(40), list[object]()
    np.savez(tmp_path / "data.npz", **{**data, "x": data["x"].astype(np.float64)})
    monkeypatch.setattr(data_module, "load_arrays", lambda path: read.append(path) or load_arrays(path))
    arguments = {"batch_size": 16, "drop_last": True}
    t, other = trainer(handmade.classifier()), trainer(handmade.classifier())
    prepared = t.prepare(tmp_path / "data.npz", **arguments)
    assert t.evaluate(prepared) != t.evaluate(data)  # which are eight more
    found = t.fit(prepared, progress=False, **arguments)
    assert found == other.fit(data, progress=False, **arguments)
    assert t.fit(prepared, 2, 8, progress=False) == other.fit(data, 2, 8, progress=False)  # in other batches
    assert len(read) == 1


def test_evaluation_weights_samples_not_batches() -> None:
    t = trainer()
    data = handmade.points(50)
    whole = t.evaluate(data, batch_size=50)
    assert t.evaluate(data, batch_size=16) == pytest.approx(whole, rel=1e-5)
    parts = [{k: v[:40] for k, v in data.items()}, {k: v[40:] for k, v in data.items()}]
    assert t.evaluate(parts) == pytest.approx(whole, rel=1e-5)
    before = t.state_dict()
    t.evaluate(data)
    assert all(np.array_equal(v, before[k]) for k, v in t.state_dict().items())


@pytest.mark.parametrize("ignored", [0, 7])
def test_evaluation_and_history_weight_the_labels_that_count(ignored: int) -> None:
    linear = gg.frontend.export(gg.frontend.nn.Linear(4, 3), {"x": ("batch", 4)})
    t = trainer(gg.build(linear, gg.losses.cross_entropy(ignore_index=ignored), gg.optim.sgd(0.0)))
    random = np.random.default_rng(0)
    data = {"x": random.normal(size=(50, 4)).astype(np.float32), "target": random.integers(0, 3, 50)}
    data["target"][:10], data["target"][-1] = ignored, 1
    whole = t.evaluate(data, batch_size=50)
    assert t.evaluate(data, batch_size=16) == pytest.approx(whole, rel=1e-5)
    history = t.fit(data, batch_size=16, shuffle=False, progress=False)
    assert history["loss"] == pytest.approx([whole["loss"]], rel=1e-5)


def test_predict_and_export_agree_with_the_eval_graph(tmp_path: Path) -> None:
    step = handmade.classifier()
    t = trainer(step)
    t.fit(handmade.points(), epochs=2, progress=False)  # an odd number of steps or not: both sides of the state count
    t.step(handmade.points(8))
    data = handmade.points(30, seed=3)
    evaluation = ort.InferenceSession(step.eval.SerializeToString(), QUIET.session_options())
    state = t.state_dict()
    feeds = {i.name: {**data, **state}[i.name] for i in evaluation.get_inputs()}
    expected = dict(zip(["logits", "probs"], evaluation.run(["logits", "probs"], feeds), strict=True))

    model = t.export(tmp_path / "trained.onnx")
    onnx.checker.check_model(str(tmp_path / "trained.onnx"), full_check=True)
    assert [i.name for i in model.graph.input] == ["x", "z"]
    assert [o.name for o in model.graph.output] == ["logits", "probs"]
    assert {t.name for t in model.graph.initializer} >= {"w1", "b1", "w2", "b2", "mean"}
    exported = ort.InferenceSession(tmp_path / "trained.onnx", QUIET.session_options())
    for batch_size in (30, 7):
        predicted = t.predict(data, batch_size=batch_size)
        for name, value in expected.items():
            np.testing.assert_allclose(predicted[name], value, rtol=1e-6, atol=1e-6)
    for found, name in zip(exported.run(None, {"x": data["x"], "z": data["z"]}), expected, strict=True):
        np.testing.assert_allclose(found, expected[name], rtol=1e-6, atol=1e-6)


def test_predict_with_one_input_and_output() -> None:
    t = trainer(handmade.regression())
    data = linear_data()
    expected = data["x"] @ t.parameters["w"]
    for x in (data["x"], {"x": data["x"]}, data, (data["x"],)):
        np.testing.assert_allclose(t.predict(x, batch_size=16), expected, rtol=1e-5)


def test_model_with_a_fixed_batch() -> None:
    t = trainer(handmade.regression(batch=8))
    assert t.fit(linear_data(40), progress=False)["step"] == [5]
    assert t.predict(linear_data(16)["x"]).shape == (16, 1)
    x = linear_data(19)["x"]
    for rows in (19, 3):  # the last batch is filled up; of 3 samples it is the only one
        np.testing.assert_allclose(t.predict(x[:rows]), x[:rows] @ t.parameters["w"], rtol=1e-5)
    assert [len(part) for part in t.predict(x, per_batch=True)] == [8, 8, 3]
    with pytest.raises(DataError, match="a fixed batch size of 8, but the last batch of 42 samples has only 2"):
        t.fit(linear_data(42), progress=False)
    assert t.fit(linear_data(42), drop_last=True, progress=False)["step"] == [10]
    with pytest.raises(DataError, match="pass batch_size=8"):
        t.fit(linear_data(40), batch_size=10, progress=False)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"epochs": 2}, 14),
        ({"epochs": 9, "max_steps": 10}, 10),
        ({"epochs": 3, "limit": 2}, 6),
        ({"epochs": 1, "drop_last": True}, 6),
        ({"epochs": 1, "max_time": 1e-9}, 0),
    ],
)
def test_fit_ends_where_it_should(options: dict[str, object], steps: int) -> None:
    t = trainer()
    t.fit(handmade.points(97), batch_size=15, progress=False, **options)  # type: ignore[arg-type]
    assert t.progress.steps == steps


def test_an_epoch_that_is_cut_short_has_a_row() -> None:
    t = trainer()
    history = t.fit(handmade.points(97), epochs=3, batch_size=15, max_steps=9, progress=False)
    assert (history["epoch"], history["step"]) == ([1, 2], [7, 9])
    assert np.isfinite(history["loss"]).all()
    assert t.history["step"] == [7]  # what is kept for a resume knows whole epochs only


@pytest.mark.parametrize(("name", "value"), [("epochs", 1.5), ("batch_size", 2.5), ("max_steps", 0), ("limit", True)])
def test_counts_are_whole_numbers(name: str, value: object) -> None:
    with pytest.raises(DataError, match=f"{name} must be a whole number above zero"):
        trainer().fit(handmade.points(97), progress=False, **{name: value})  # type: ignore[arg-type]


def test_learning_rate_may_be_a_function() -> None:
    t = trainer()
    seen: list[float] = []

    class Watch:
        def on_step(self, trainer: Trainer, results: object) -> None:
            seen.append(trainer.progress.hyperparameters["learning_rate"])

    t.fit(
        handmade.points(64), batch_size=16, learning_rate=lambda s: 0.1 / (s + 1), callbacks=[Watch()], progress=False
    )
    assert seen == [0.1, 0.05, 0.1 / 3, 0.025]


def test_callbacks_in_their_order() -> None:
    calls: list[str] = []

    class Watch:
        def on_step(self, trainer: Trainer, results: dict[str, object]) -> None:
            calls.append("step" if {"loss", "accuracy"} == set(results) else "?")

        def on_epoch(self, trainer: Trainer, row: object) -> bool:
            calls.append("epoch")
            return True

        def on_end(self, trainer: Trainer, history: object) -> None:
            calls.append("end")

    trainer().fit(handmade.points(32), epochs=5, batch_size=16, callbacks=[Watch()], progress=False)
    assert calls == ["step", "step", "epoch", "end"]


def test_patience_stops_and_goes_back_to_the_best(tmp_path: Path) -> None:
    t = trainer()
    held_out = handmade.points(40, seed=5)
    options: dict[str, Any] = {
        "epochs": 50,
        "batch_size": 96,
        "validation": held_out,
        "learning_rate": lambda step: 0.2 if step < 10 else 200.0,  # worse from the eleventh step on
        "patience": 3,
        "checkpoint": tmp_path / "run.ckpt",
        "progress": False,
    }
    history = t.fit(handmade.points(), **options)
    best = int(np.argmin(history["val_loss"]))
    assert len(history) == best + 1 + 3
    assert t.evaluate(held_out)["loss"] == pytest.approx(history["val_loss"][best], rel=1e-6)
    again = Trainer.resume(handmade.classifier(), tmp_path / "run.best.ckpt", device="cpu", options=QUIET)
    assert all(np.array_equal(v, t.state_dict()[k]) for k, v in again.state_dict().items())
    over = Trainer.resume(handmade.classifier(), tmp_path / "run.ckpt", device="cpu", options=QUIET)
    assert len(over.fit(handmade.points(), **options)) == len(history)  # it had stopped, and stays so
    assert all(np.array_equal(v, t.state_dict()[k]) for k, v in over.state_dict().items())
    assert len(over.fit(handmade.points(), **options | {"patience": 2, "epochs": 1})) == 1  # another fit


def test_divergence_names_the_step_and_keeps_the_state() -> None:
    t = trainer(handmade.regression())
    data = linear_data()
    with pytest.raises(
        DivergedError,
        match=r"the loss became (inf|nan) in step \d+ \(.* is kept\); lower the learning",
    ):
        t.fit(data, epochs=500, batch_size=40, learning_rate=50.0, progress=False)
    assert np.isfinite(t.parameters["w"]).all()
    with np.errstate(over="ignore", invalid="ignore"):
        careless = trainer(handmade.regression(), check_loss=False)
        careless.fit(data, epochs=40, batch_size=40, learning_rate=50.0, progress=False)
    assert careless.progress.steps == 40


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_diverged_step_can_be_repeated(tmp_path: Path, shuffle: bool) -> None:
    """From the error, and by a run that resumes where the first stood."""
    t, data = trainer(handmade.regression()), linear_data()
    data["x"][17] = np.nan
    fit = {"data": data, "epochs": 2, "batch_size": 8, "learning_rate": 0.01, "progress": False, "shuffle": shuffle}
    with pytest.raises(DivergedError, match=r"^batch (\d) of epoch 1 .resume from .* to repeat this batch") as first:
        t.fit(**fit, checkpoint=tmp_path / "run.ckpt")
    error = first.value
    assert np.isnan(error.batch["x"]).any() and error.hyperparameters == {"learning_rate": 0.01}
    for array in data.values():
        array[...] = 0  # the error has copies
    assert np.isnan(error.batch["x"]).any()
    with pytest.raises(DivergedError) as again:
        t.step(error.batch, **error.hyperparameters)
    data.update(linear_data())
    data["x"][17] = np.nan
    other = Trainer.resume(handmade.regression(), tmp_path / "run.diverged.ckpt", device="cpu", options=QUIET)
    with pytest.raises(DivergedError) as resumed:
        other.fit(**fit)
    for found in (again.value, resumed.value):
        assert all(np.array_equal(v, error.batch[k], equal_nan=True) for k, v in found.batch.items())
    assert other.progress.steps == t.progress.steps


def test_a_failed_step_leaves_running_statistics_alone() -> None:
    """Onnxruntime's BatchNormalization writes over the statistics that it is fed; the state must not see that."""
    make = onnx.helper.make_node
    statistics = {"scale": np.ones(3), "bias": np.zeros(3), "mean": np.zeros(3), "var": np.ones(3)}
    nodes = [make("BatchNormalization", ["x", *statistics], ["n"]), make("Gemm", ["n", "w"], ["y"])]
    weights = {**statistics, "w": np.ones((3, 2))}
    graph = onnx.helper.make_graph(
        nodes,
        "norm",
        [onnx.helper.make_tensor_value_info("x", 1, ["batch", 3])],
        [onnx.helper.make_tensor_value_info("y", 1, ["batch", 2])],
        [onnx.numpy_helper.from_array(v.astype(np.float32), k) for k, v in weights.items()],
    )
    opset = [onnx.helper.make_opsetid("", 21)]
    t = trainer(gg.build(onnx.helper.make_model(graph, opset_imports=opset, ir_version=10), "mse", gg.optim.sgd(0.1)))
    batch = {
        "x": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32),
        "target": np.zeros((8, 2), np.float32),
    }
    t.step(batch)
    before = t.state_dict()
    assert not np.array_equal(before["mean"], np.zeros(3))
    with pytest.raises(DivergedError):
        t.step({**batch, "x": batch["x"] * np.float32(np.nan)})
    assert all(np.array_equal(v, before[k]) for k, v in t.state_dict().items())


def test_a_batch_changed_in_place_is_seen() -> None:
    """Memory that is bound already is not bound again, but what lies in it counts."""
    t, other = trainer(), trainer()
    batch = handmade.points(8)
    for seed in (1, 2, 3, 4):
        for name, array in handmade.points(8, seed=seed).items():
            batch[name][...] = array
        assert t.step(batch)["loss"] == other.step(handmade.points(8, seed=seed))["loss"]
    small = {name: array[:4] for name, array in batch.items()}
    assert t.step(small)["loss"] == other.step({n: a.copy() for n, a in small.items()})["loss"]


def test_folder_with_large_frozen_weights(tmp_path: Path) -> None:
    """Weights in frozen.bin are mapped, for training, evaluation, prediction and export alike."""
    n = 600
    step = handmade.regression(features=n)
    frozen = np.random.default_rng(0).normal(size=(n, n), scale=n**-0.5).astype(np.float32)
    for model in (step.train, step.eval):
        model.graph.initializer.append(onnx.numpy_helper.from_array(frozen, "frozen"))
        for node in model.graph.node:
            node.input[:] = ["hidden" if name == "x" else name for name in node.input]
        model.graph.node.insert(0, onnx.helper.make_node("MatMul", ["x", "frozen"], ["hidden"]))
    step.save(tmp_path / "s")
    assert (tmp_path / "s" / "frozen.bin").stat().st_size == n * n * 4
    memory, disk = trainer(step), trainer(tmp_path / "s")
    data = linear_data(8, n)
    for _ in range(3):
        assert memory.step(data, learning_rate=1e-4)["loss"] == disk.step(data, learning_rate=1e-4)["loss"]
    assert memory.evaluate(data) == disk.evaluate(data)
    assert np.array_equal(memory.predict(data["x"]), disk.predict(data["x"]))
    exported = ort.InferenceSession(disk.export().SerializeToString(), QUIET.session_options())
    np.testing.assert_allclose(exported.run(None, {"x": data["x"]})[0], disk.predict(data["x"]), rtol=1e-6)


def test_initial_weights_beyond_protobuf_lie_beside_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_folder, "LEAST_KEPT", 1000)
    monkeypatch.setattr(step_folder, "LEAST_BYTES", 100)
    step = handmade.regression(features=600)
    step.save(tmp_path / "s")
    assert (tmp_path / "s" / "init.bin").stat().st_size == 2400
    t = trainer(tmp_path / "s")
    assert np.array_equal(t.parameters["w"], trainer(step).parameters["w"])
    Step.load(tmp_path / "s").save(tmp_path / "again")
    assert np.array_equal(trainer(tmp_path / "again").parameters["w"], t.parameters["w"])


def test_state_dict_round_trip() -> None:
    t, other = trainer(), trainer()
    t.step(handmade.points(8))
    other.load_state_dict(t.state_dict())
    assert t.step(handmade.points(8))["loss"] == other.step(handmade.points(8))["loss"]
    state = t.state_dict()
    for broken, says in [
        ({k: v for k, v in state.items() if k != "w1"}, "lacks 'w1'"),
        ({**state, "w9": state["w1"]}, "contains 'w9', which"),
        ({**state, "w1": state["w1"].T}, "float32[8, 4] in the state, but float32[4, 8]"),
        ({**state, "w1": state["w1"].astype(np.float64)}, "is float64"),
    ]:
        with pytest.raises(CheckpointError, match=re.escape(says)):
            other.load_state_dict(broken)


def test_wrong_hyperparameter() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'learning_rate'"):
        trainer().step(handmade.points(8), lerning_rate=0.1)
    with pytest.raises(UnknownNameError, match="did you mean 'momentum'"):
        trainer().fit(handmade.points(8), momentun=0.1)


@pytest.mark.parametrize("rate", [np.nan, np.inf, 1e39, -0.1, -np.inf])
def test_a_learning_rate_that_is_negative_or_not_finite_costs_no_state(rate: float) -> None:
    t = trainer()
    before = t.state_dict()
    with pytest.raises(DataError, match=r"'learning_rate' is .*; give a finite number of 0 or more$"):
        t.step(handmade.points(8), learning_rate=rate)
    with pytest.raises(DataError, match=r"'learning_rate' is .*; give a finite number of 0 or more$"):
        t.fit(handmade.points(8), learning_rate=rate, progress=False)
    assert t.progress.steps == 0
    assert all(np.array_equal(v, before[n]) for n, v in t.state_dict().items())
    assert np.isfinite(t.step(handmade.points(8))["loss"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "tpu"}, "there is no device 'tpu'"),
        ({"providers": ["NoSuchExecutionProvider"]}, "has no NoSuchExecutionProvider"),
        ({"providers": "CPUExecutionProvider"}, "should be a list"),
        ({"providers": []}, "should be a list"),
    ],
)
def test_unavailable_devices(options: dict[str, object], says: str) -> None:
    with pytest.raises(RuntimeUnavailableError, match=says):
        Trainer(handmade.regression(), **options)  # type: ignore[arg-type]


NO_CUDA = pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="CUDA is there")


@NO_CUDA
def test_no_cuda_is_an_error_if_it_was_asked_for() -> None:
    with pytest.raises(RuntimeUnavailableError, match=r"has no CUDAExecutionProvider .* onnxruntime-gpu"):
        Trainer(handmade.regression(), device="cuda")
    assert Trainer(handmade.regression()).device == "cpu"


@NO_CUDA
def test_cuda_that_does_not_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As on a machine with onnxruntime-gpu and no driver: an error if asked for, a warning for "auto"."""
    names = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(session.ort, "get_available_providers", lambda: names)
    for options in ({"device": "cuda"}, {"providers": names}):
        with pytest.raises(RuntimeUnavailableError, match="could not start CUDAExecutionProvider"):
            Trainer(handmade.regression(), **options)  # type: ignore[arg-type]
    assert not caplog.records
    assert Trainer(handmade.regression()).device == "cpu"
    assert "device 'auto' uses the CPU instead" in caplog.text


def test_failures_inside_onnxruntime_name_the_node() -> None:
    step = handmade.classifier()
    node = next(n for n in step.train.graph.node if n.output[0] == "loss")
    node.op_type = "Sum"
    node.input.append("far")
    index = onnx.helper.make_tensor("index", onnx.TensorProto.INT64, [2], [100, 3])
    step.train.graph.initializer.append(index)  # row 100 of a batch of 8: only a run can tell
    step.train.graph.node.insert(0, onnx.helper.make_node("GatherND", ["x", "index"], ["far"], name="the/node"))
    t = trainer(step)
    before = t.state_dict()
    with pytest.raises(ModelError, match=re.escape("failed at GatherND (node 'the/node')")):
        t.step(handmade.points(8))
    assert all(np.array_equal(v, before[k]) for k, v in t.state_dict().items())
    assert np.isfinite(t.step(handmade.points(101))["loss"])
    node.op_type = "NoSuchOp"
    with pytest.raises(ModelError, match=r"onnxruntime refuses the model.*NoSuchOp"):
        trainer(step).step(handmade.points(8))


@pytest.mark.parametrize(("dtype", "notes"), [("float64", ["'x' is converted from float64 to float32"]), ("bool", [])])
def test_conversions_are_noted_once(dtype: str, notes: list[str], caplog: pytest.LogCaptureFixture) -> None:
    t = trainer()
    batch = handmade.points(8)
    batch["x"] = batch["x"].astype(dtype)
    with caplog.at_level(logging.WARNING, "gradgraph"):
        for _ in range(3):
            t.step(batch)
    assert [r.getMessage() for r in caplog.records] == notes


def test_a_trainer_is_not_pickled_but_its_step_is() -> None:
    t = trainer()
    for make in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"cannot be pickled or copied.*Trainer.resume"):
            make(t)
    other = trainer(pickle.loads(pickle.dumps(t.definition)))
    assert other.step(handmade.points(8))["loss"] == t.step(handmade.points(8))["loss"]


@pytest.mark.sweep(0)
def test_a_process_that_only_loads_a_step_can_train_it(tmp_path: Path) -> None:
    """The operators that a saved step calls are known without anything of what has built it."""
    gg.build(exported("residual", "batch"), "cross_entropy", "adamw").save(tmp_path / "step")
    code = """import sys, numpy as np, gradgraph as gg
trainer = gg.Trainer(sys.argv[1], device="cpu")
batch = {s.name: np.zeros([s.shape[0] if isinstance(s.shape[0], int) else 2, *s.shape[1:]], s.dtype)
         for s in trainer.manifest.batch}
print(sorted(trainer.step(batch)))"""
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "step")], capture_output=True, text=True, timeout=120
    )
    assert "loss" in ran.stdout, ran.stderr

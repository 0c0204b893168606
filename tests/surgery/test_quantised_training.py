"""Training through rounding: what is rounded, what gradients pass, and the integers of an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph import frontend, surgery
from gradgraph.errors import ArgumentError, BuildError, DataError, UnknownNameError
from gradgraph.frontend import nn

RNG = np.random.default_rng(0)
Array = np.ndarray
X = RNG.normal(size=(64, 6)).astype(np.float32)


def linear(turned: bool) -> onnx.ModelProto:
    shape = (4, 6) if turned else (6, 4)
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=int(turned))
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", 1, ["rows", 6])],
        [helper.make_tensor_value_info("y", 1, ["rows", 4])],
        [numpy_helper.from_array(RNG.normal(size=s).astype(np.float32), n) for n, s in (("w", shape), ("b", (4,)))],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def weights(model: onnx.ModelProto) -> dict[str, Array]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def rounded_weight(w: Array, largest: int, axis: int) -> Array:
    scale = np.abs(w).max(1 - axis, keepdims=True) / np.float32(largest)
    return np.rint(w / scale) * scale


def rounded_data(x: Array, sample: Array) -> Array:
    low, high = min(sample.min(), 0), max(sample.max(), 0)
    scale = np.float32((high - low) / 255)
    zero = round(float(-low / scale))
    return (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(("kind", "largest"), [("int8", 64), ("int4", 7)])
def test_the_formula_and_the_gradient(kind: str, largest: int, turned: bool) -> None:
    model = linear(turned)
    w, b = weights(model)["w"], weights(model)["b"]
    axis = 0 if turned else 1
    step = gg.build(gg.qat(model, {"x": X}, weights=kind), "mse", gg.optim.sgd(0.1))
    trainer, target = gg.Trainer(step, device="cpu"), RNG.normal(size=(64, 4)).astype(np.float32)
    x, q = rounded_data(X, X), rounded_weight(w, largest, axis)
    y = x @ (q.T if turned else q) + b
    np.testing.assert_allclose(trainer.predict(X), y, rtol=1e-4, atol=1e-5)
    loss = trainer.step({"x": X, "target": target})["loss"]
    np.testing.assert_allclose(loss, ((y - target) ** 2).mean(), rtol=1e-5)
    change = x.T @ (2 * (y - target) / y.size)  # as if nothing had been rounded behind what is read
    np.testing.assert_allclose(
        trainer.state_dict()["w"], w - 0.1 * (change.T if turned else change), rtol=1e-4, atol=1e-6
    )


def test_data_beyond_the_range_have_no_gradient() -> None:
    model = frontend.export(nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 4)), {"x": ("rows", 6)})
    narrow = gg.qat(model, {"x": X * 1e-3}, target="1")  # of data that are larger, nearly all results lie beyond
    moved = []
    for made in (narrow, model):
        trainer = gg.Trainer(gg.build(made, "mse", gg.optim.sgd(1.0)), device="cpu")
        before = trainer.state_dict()["0.weight"]
        trainer.step({"x": X, "target": np.ones((64, 4), np.float32)})
        moved.append(np.abs(trainer.state_dict()["0.weight"] - before).max())
    assert moved[0] < 0.1 * moved[1]


@pytest.mark.sweep(0.7)
@pytest.mark.parametrize(("kind", "stored"), [("int8", TensorProto.INT8), ("int4", TensorProto.INT4)])
@pytest.mark.parametrize("activations", ["uint8", "int8", None])
def test_an_exported_model_stores_integers_and_computes_the_same(
    kind: str, stored: int, activations: str | None, tmp_path: Path
) -> None:
    layers = (nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))
    model = frontend.export(nn.Sequential(*layers), {"x": ("rows", 1, 6, 6)})
    x = RNG.normal(size=(32, 1, 6, 6)).astype(np.float32)
    step = gg.build(
        gg.qat(model, {"x": x}, weights=kind, activations=activations), "cross_entropy", gg.optim.adam(1e-2)
    )
    assert set(step.manifest.trainable) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    trainer = gg.Trainer(step, device="cpu")
    trainer.fit({"x": x, "target": RNG.integers(0, 5, 32)}, epochs=3, progress=False)
    exported = trainer.export(tmp_path / "q.onnx")
    kinds = {t.name: t.data_type for t in exported.graph.initializer}
    assert kinds["0.weight_quantized"] == kinds["3.weight_quantized"] == stored
    assert "0.weight" not in kinds
    pairs = {n.op_type for n in exported.graph.node}
    assert ("QuantizeLinear" in pairs) == (activations is not None)
    assert "Abs" not in pairs
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (y,) = ort.InferenceSession(tmp_path / "q.onnx", options, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_allclose(y, trainer.predict(x), rtol=2e-2, atol=2e-2)
    onnx.checker.check_model(exported, full_check=True)


@pytest.fixture(scope="module")
def reader_of_digits() -> tuple[gg.Trainer, dict[str, Array], dict[str, Array]]:
    """A network trained in float, what it was trained on, and what was held out."""
    datasets = pytest.importorskip("sklearn.datasets", reason="the digits are those of scikit-learn")
    digits = datasets.load_digits()
    order = np.random.default_rng(1).permutation(len(digits.target))
    x, y = (digits.data[order] / 16).astype(np.float32), digits.target[order]
    data, held_out = {"x": x[:1400], "target": y[:1400]}, {"x": x[1400:], "target": y[1400:]}
    model = frontend.export(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), {"x": ("rows", 64)})
    trainer = gg.Trainer(gg.build(model, "cross_entropy", gg.optim.adam(3e-3), metrics="accuracy"), device="cpu")
    trainer.fit(data, epochs=15, batch_size=64, progress=False)
    return trainer, data, held_out


@pytest.mark.sweep(0.27)
@pytest.mark.parametrize("ranges", ["observed", "learned"])
def test_digits_are_read_as_well_as_in_float(ranges: str, reader_of_digits: Any) -> None:
    first, data, held_out = reader_of_digits
    rounded = gg.qat(first.export(), data, ranges=ranges)
    second = gg.Trainer(gg.build(rounded, "cross_entropy", gg.optim.adam(5e-4), metrics="accuracy"), device="cpu")
    second.fit(data, epochs=4, batch_size=64, progress=False)
    accuracy = [t.evaluate(held_out)["accuracy"] for t in (first, second)]
    assert accuracy[0] > 0.94
    assert accuracy[1] > accuracy[0] - 0.005


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: gg.qat(linear(True)), BuildError, "ranges of the layers' inputs must be observed on data"),
        (lambda: gg.qat(linear(True), {"z": X}), DataError, "the data have no 'x', which the model reads"),
        (lambda: gg.qat(linear(True), {"x": X * np.nan}), DataError, "'x' is not finite"),
        (lambda: gg.qat(linear(True), {"x": X}, target="head"), UnknownNameError, "no layer with a stored weight"),
        (lambda: gg.qat(gg.qat(linear(True), {"x": X}), {"x": X}), BuildError, "already has fake quantisation"),
        (lambda: gg.qat(linear(True), {"x": X}, weights="int16"), ArgumentError, "'int8' or 'int4'"),
        (lambda: gg.qat(linear(True), {"x": X}, activations="float8"), ArgumentError, "'uint8', 'int8', 'uint16'"),
    ],
)
def test_what_is_refused(call: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as raised:
        call()  # type: ignore[operator]
    assert says in str(raised.value)


@pytest.mark.parametrize("opset", [11, 13, 17])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_older_opsets_and_convolutions_with_groups(weights: str, opset: int) -> None:
    layers = (nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(16, 3))
    model = frontend.export(nn.Sequential(*layers), {"x": ("rows", 2, 6, 6)})
    model.opset_import[0].version, model.ir_version = opset, 7  # nothing in it differs
    x = RNG.normal(size=(8, 2, 6, 6)).astype(np.float32)
    made = gg.qat(model, {"x": x}, weights=weights)
    assert sum(n.op_type == "QuantizeLinear" for n in made.graph.node) == 6
    exported = gg.Trainer(gg.build(made, "mse"), device="cpu").export()
    assert {"0.weight_quantized", "2.weight_quantized", "4.weight_quantized"} <= {
        t.name for t in exported.graph.initializer
    }


def test_only_what_is_named_is_rounded() -> None:
    network = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    model = gg.qat(frontend.export(network, {"x": ("rows", 6)}), {"x": X}, target="1", activations=None)
    assert sum(n.op_type == "QuantizeLinear" for n in model.graph.node) == 1
    assert surgery.qat is gg.qat

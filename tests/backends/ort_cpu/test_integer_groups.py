"""Frozen layers of a quantised model run in integers, with the numbers of an inference session of the same file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_cpu import ORT_CPU, integer_groups
from gradgraph.backends.ort_cpu.integer_groups import hide_integer_groups, show_integer_groups
from gradgraph.backends.ort_native import ORT_NATIVE
from gradgraph.building import pipeline
from gradgraph.frontend import export, nn
from gradgraph.passes.normal import normalise
from tests.kit.running import run

RNG = np.random.default_rng(0)
ROWS, CLASSES = 12, 4
Array = np.ndarray[Any, Any]


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.deep = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.wide = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Any) -> Any:
        return (x + self.wide(self.deep(x).relu())).relu()


def pictures() -> nn.Sequential:
    """Channels fill blocks, so that without integers each convolution would be computed in blocks."""
    layers = (nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), Residual(32), nn.MaxPool2d(2), Residual(32))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 6))


def rows() -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 48), nn.Sigmoid(), nn.Linear(48, 6))


NETWORKS = {"pictures": (pictures, (3, 12, 12)), "rows": (rows, (24,))}


def data(shape: tuple[int, ...]) -> Array:
    return RNG.normal(size=(ROWS, *shape)).astype(np.float32)


def quantised(name: str) -> tuple[onnx.ModelProto, Array]:
    """Return a quantised model with a new float head, and data."""
    network, shape = NETWORKS[name]
    x = data(shape)
    small = gg.quantize(export(network(), {"x": ("rows", *shape)}), {"x": x}).result
    return gg.new_head(small, CLASSES), x


def rounded(name: str) -> tuple[onnx.ModelProto, Array]:
    """Return a model exported by quantisation-aware training, with a new float head, and data."""
    network, shape = NETWORKS[name]
    x = data(shape)
    step = gg.build(gg.qat(export(network(), {"x": ("rows", *shape)}), {"x": x}), "mse", gg.optim.sgd(0.1))
    return gg.new_head(gg.Trainer(step, device="cpu").export(), CLASSES), x


MAKERS = {"quantize": quantised, "qat": rounded}


def executed(model: onnx.ModelProto, folder: Path) -> Counter[str]:
    """Count the integer operators that onnxruntime executes for ``model``."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "executed.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = (node.op_type for node in onnx.load(folder / "executed.onnx").graph.node)
    return Counter(name for name in names if name.startswith(("QLinear", "QGemm")) or "Integer" in name)


def features_of(model: onnx.ModelProto) -> str:
    return next(node.input[0] for node in model.graph.node if "head.weight" in node.input)


def with_output(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    result.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return result


@pytest.mark.parametrize("made", MAKERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_numbers_are_those_of_inference(name: str, made: str, tmp_path: Path) -> None:
    model, x = MAKERS[made](name)
    step = gg.build(model, "cross_entropy", gg.optim.sgd(0.5), train="head.*")
    low = for_machine(step.train, ORT_CPU, {"rows": ROWS})
    assert executed(low, tmp_path) == executed(model, tmp_path)
    assert executed(low, tmp_path)
    feeds = {**run(step.init), "x": x, "target": np.arange(ROWS) % CLASSES, "learning_rate": np.array(0.5, np.float32)}
    found = run(with_output(low, features_of(low)), feeds)
    expected = run(with_output(model, features_of(model)), {"x": x})
    np.testing.assert_array_equal(found[features_of(low)], expected[features_of(model)])
    logits = expected[model.graph.output[0].name].astype(np.float64)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(ROWS), feeds["target"]]
    np.testing.assert_allclose(found["loss"], losses.mean(), rtol=1e-5)


@pytest.mark.parametrize("native", [False, None])
def test_a_trained_head_learns_and_predicts_in_integers(native: bool | None, tmp_path: Path) -> None:
    """All sessions of a trainer agree with inference of what it exports."""
    model, x = quantised("pictures")
    step = gg.build(model, "cross_entropy", gg.optim.sgd(0.1), train="head.*")
    trainer = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(native_kernels=native))
    batch = {"x": x, "target": np.arange(ROWS) % CLASSES}
    losses = [float(trainer.step(batch)["loss"]) for _ in range(5)]
    assert losses[-1] < losses[0]
    trained = trainer.export(tmp_path / "trained.onnx")
    output = trained.graph.output[0].name
    np.testing.assert_allclose(trainer.predict(x), run(trained, {"x": x})[output], rtol=1e-5, atol=1e-6)
    assert executed(trained, tmp_path) == executed(model, tmp_path)
    assert trainer.evaluate(batch)["loss"] == pytest.approx(float(trainer.step(batch)["loss"]), rel=1e-5)


@pytest.mark.parametrize("backend", [ORT_CPU, ORT_NATIVE])
def test_operators_return_to_their_domain(backend: Any) -> None:
    model, _ = quantised("pictures")
    step = gg.build(model, "cross_entropy", gg.optim.sgd(0.5), train="head.*")
    low = for_machine(step.train, backend, {"rows": ROWS})
    assert "gradgraph.integers" not in {o.domain for o in low.opset_import} | {n.domain for n in low.graph.node}
    kept = Counter(node.op_type for node in low.graph.node if not node.domain)
    assert kept["Conv"] == 5
    assert kept["MaxPool"] == 1


# --- the groups --------------------------------------------------------------------------------------------------

STORED = """<float s = {0.1}, uint8 z = {128}, int8[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 64, 9, 1, 2, 3, -64, 5, 6, 7},
  float v = {0.2}, int8 n = {0}, int32[4] b = {100, 200, 300, -400}, float p = {0.02}, float o = {0.03}, int32 m = {0},
  float[4] f = {1, 2, 3, 4}, uint16 z16 = {9}>"""
DATA = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)"
WEIGHT = "e = DequantizeLinear(w, v, n)"
END = "r = QuantizeLinear(y, s, z) out = DequantizeLinear(r, s, z)"


def hidden(nodes: str, outputs: str = "float[2, 4] out", inputs: str = "float[2, 4] x") -> list[str]:
    """Return the operators that are hidden; ``show_integer_groups`` restores the model."""
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => ({outputs}) {STORED} {{ {nodes} }}'
    model = normalise(onnx.parser.parse_model(text), keep_quantization=True)
    before = ir.to_proto(model)
    hide_integer_groups(model)
    found = [node.op_type for node in model.graph if node.domain]
    show_integer_groups(model)
    assert ir.to_proto(model) == before
    return found


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        (f"{DATA} {WEIGHT} y = MatMul(d, e) {END}", ["MatMul"]),
        (f"{DATA} {WEIGHT} out = MatMul(d, e)", ["MatMul"]),
        (f"{DATA} {WEIGHT} c = DequantizeLinear(b, p) y = Gemm(d, e, c) {END}", ["Gemm"]),
        (f"{DATA} {WEIGHT} c = DequantizeLinear(b, p, m) y = Gemm(d, e, c) {END}", ["Gemm"]),
        (f"{DATA} {WEIGHT} y = Gemm(d, e, f) {END}", ["Gemm"]),
        (f"{DATA} {WEIGHT} a = MatMul(d, e) y = Relu(a) {END}", ["MatMul", "Relu"]),
        (f"{DATA} y = Add(d, d) {END}", ["Add"]),
        (f"{DATA} y = Sigmoid(d) {END}", ["Sigmoid"]),
        (f"{DATA} y = Sin(d) {END}", []),
        ("y = Sigmoid(x) " + END, []),
        (f"{DATA} y = Add(d, x) {END}", []),
        (f"{DATA} y = Sigmoid(d) {END} more = Neg(y)", []),
        (f"{DATA} {WEIGHT} y = Gemm <alpha = 0.5> (d, e) {END}", ["Gemm"]),
        (f"{DATA} {WEIGHT} c = DequantizeLinear(b, p) y = Gemm <alpha = 0.5> (d, e, c) {END}", []),
        (f"{DATA} {WEIGHT} c = DequantizeLinear(b, p) y = Gemm <beta = 0.5> (d, e, c) {END}", []),
        (f"{WEIGHT} y = MatMul(x, e) {END}", []),
        ("q = QuantizeLinear(x, s, z16) d = DequantizeLinear(q, s, z16) y = Sigmoid(d) " + END, []),
        (f"{DATA} y = Sigmoid(d) r = QuantizeLinear(y, s, z16) out = DequantizeLinear(r, s, z16)", []),
    ],
)
def test_which_operators_are_kept(nodes: str, found: list[str]) -> None:
    more = ", float[2, 4] more" if "more" in nodes else ""
    assert hidden(nodes, f"float[2, 4] out{more}") == found


def test_scales_that_are_fed_are_no_constants() -> None:
    nodes = f"q = QuantizeLinear(x, t, z) d = DequantizeLinear(q, t, z) {WEIGHT} y = MatMul(d, e) {END}"
    assert hidden(nodes, inputs="float[2, 4] x, float t") == []


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_a_bias_of_another_scale_is_added_as_it_is(beta: float) -> None:
    """The integer kernel would read it as a multiple of the scales of data and weight."""
    nodes = f"{DATA} {WEIGHT} c = DequantizeLinear(b, o) h = Gemm <beta = {beta}> (d, e, c) k = QuantizeLinear(h, s, z)"
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[2, 4] x) => (float[2, 4] y) {STORED}
        {{ {nodes} l = DequantizeLinear(k, s, z) y = Mul(l, head) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "head"))
    x = RNG.normal(size=(2, 4)).astype(np.float32)
    step = gg.build(model, "mse", gg.optim.sgd(0.1), train="head")
    loss = gg.Trainer(step, device="cpu").step({"x": x, "target": np.zeros((2, 4), np.float32)})["loss"]
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    d = (np.clip(np.rint(x / np.float32(0.1)) + 128, 0, 255) - 128) * 0.1
    h = d @ (stored["w"] * 0.2) + stored["b"] * 0.03 * beta
    y = (np.clip(np.rint(h / 0.1) + 128, 0, 255) - 128) * 0.1
    np.testing.assert_allclose(loss, (y**2).mean(), rtol=1e-5)


@pytest.mark.parametrize(("scale", "found"), [(1 / 256, ["Softmax"]), (1 / 1000, [])])
def test_a_softmax_of_small_outputs_stays_in_floats(scale: float, found: list[str], tmp_path: Path) -> None:
    """The integer kernel would return 0 for the largest ones."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[2, 8] x) => (float[2, 8] out)
        <float s = {{0.004}}, uint8 z = {{128}}, float t = {{{scale}}}, uint8 n = {{0}}>
        {{ q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Softmax(d)
           r = QuantizeLinear(y, t, n) p = DequantizeLinear(r, t, n) out = Mul(p, head) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(8, np.float32), "head"))
    step = gg.build(model, "mse", gg.optim.sgd(0.1), train="head")
    x, target = RNG.normal(size=(2, 8)).astype(np.float32) * 0.2, np.zeros((2, 8), np.float32)
    d = (np.clip(np.rint(x / np.float32(0.004)) + 128, 0, 255) - 128) * 0.004
    y = np.clip(np.rint(np.exp(d) / np.exp(d).sum(1, keepdims=True) / scale), 0, 255) * scale
    loss = gg.Trainer(step, device="cpu").step({"x": x, "target": target})["loss"]
    np.testing.assert_allclose(loss, (y**2).mean(), rtol=0.02)
    kinds = executed(for_machine(step.train, ORT_CPU, {}), tmp_path)
    assert [name for name in kinds if "Softmax" in name] == ["QLinear" + name for name in found]


@pytest.mark.parametrize("most", [64, 65])
def test_weights_that_saturate_stay_in_floats(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "STORED", STORED.replace("7, 64, 9", f"7, {most}, 9"))
    for saturating, found in ((False, ["MatMul"]), (True, ["MatMul"] if most == 64 else [])):
        monkeypatch.setattr(integer_groups, "saturates", lambda value=saturating: value)
        assert hidden(f"{DATA} {WEIGHT} y = MatMul(d, e) {END}") == found


# --- frozen layers of a model that is trained with quantisation --------------------------------------------------


def test_only_pairs_of_trained_layers_are_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update is the one of a step whose frozen pairs are arithmetic, too."""
    x = data((24,))
    model = gg.qat(export(rows(), {"x": ("rows", 24)}), {"x": x})
    plain = gg.RuntimeOptions(optimization="none", native_kernels=False)  # a pair as it is defined
    batch, found = {"x": x, "target": np.arange(ROWS) % 6}, []
    for _ in range(2):
        step = gg.build(model, "cross_entropy", gg.optim.sgd(0.5), train="4.*")
        trainer = gg.Trainer(step, device="cpu", options=plain)
        loss = float(trainer.step(batch)["loss"])
        pairs = sum(node.op_type == "DequantizeLinear" for node in step.train.graph.node)
        found.append((pairs, loss, trainer.state_dict()["4.weight"]))
        monkeypatch.setattr(pipeline, "_keep_frozen_pairs", lambda model, part: None)
    (pairs, loss, weight), (none, expected, same) = found
    assert (pairs, none) == (5, 0)  # data and weights of two layers, and the data of the third
    assert loss == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(weight, same, rtol=1e-6, atol=1e-7)


def test_adapters_below_quantised_layers_get_gradients() -> None:
    """Pairs above the first adapter pass gradients; those below it stay."""
    x = data((24,))
    small = gg.quantize(export(rows(), {"x": ("rows", 24)}), {"x": x}).result
    adapted = gg.lora(small, target="2*", rank=2)
    step = gg.build(adapted, "mse", gg.optim.sgd(0.5))
    kinds = Counter(node.op_type for node in step.train.graph.node)
    assert kinds["QuantizeLinear"] > 0
    trainer = gg.Trainer(step, device="cpu")
    batch = {"x": x, "target": np.ones((ROWS, 6), np.float32)}
    losses = [float(trainer.step(batch)["loss"]) for _ in range(20)]
    assert losses[-1] < losses[0]

"""Models that onnxruntime's quantiser writes with integer products get adapters, train, and merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import BuildError, UnknownNameError
from tests.surgery.test_adapters import IMAGES, made, node, run, trained, weights

quantization = pytest.importorskip("onnxruntime.quantization", reason="this onnxruntime comes without its quantiser")
ort.set_default_logger_severity(3)

RNG = np.random.default_rng(0)


def floats(*sizes: int) -> np.ndarray:
    return RNG.normal(size=sizes).astype(np.float32)


DENSE = made(
    [node("MatMul", ["x", "first.weight"], ["p"], name="first"), node("Add", ["p", "first.bias"], ["h"]),
     node("Relu", ["h"], ["r"]), node("MatMul", ["r", "last.weight"], ["y"], name="last")],
    {"first.weight": floats(8, 16), "first.bias": floats(16), "last.weight": floats(16, 5)}, ["rows", 8],
)  # fmt: skip
IMAGE = made(
    [node("Conv", ["x", "first.weight", "first.bias"], ["h"], pads=[1] * 4, name="first"), node("Relu", ["h"], ["r"]),
     node("GlobalAveragePool", ["r"], ["g"]), node("Flatten", ["g"], ["f"]),
     node("Gemm", ["f", "last.weight", "last.bias"], ["y"], transB=1, name="last")],
    {"first.weight": floats(6, 3, 3, 3), "first.bias": floats(6), "last.weight": floats(5, 6), "last.bias": floats(5)},
    IMAGES,
)  # fmt: skip


class Samples:
    def __init__(self, x: np.ndarray) -> None:
        self.waiting = iter([{"x": x}])

    def get_next(self) -> Any:
        return next(self.waiting, None)


def quantised(base: onnx.ModelProto, how: str, x: np.ndarray, folder: Path) -> onnx.ModelProto:
    source, target = folder / "float.onnx", folder / "quantised.onnx"
    onnx.save(base, source)
    if how.startswith("dynamic"):
        quantization.quantize_dynamic(source, target, per_channel="channel" in how, reduce_range=True)
    else:
        kind = quantization.QuantFormat.QDQ if "QDQ" in how else quantization.QuantFormat.QOperator
        quantization.quantize_static(source, target, Samples(x), quant_format=kind, per_channel="channel" in how,
                                     reduce_range=True)  # fmt: skip
    return onnx.load(target)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("sizes", [(8, 8), (8, 5)], ids=str)
def test_scales_by_channel_of_a_gemm(sizes: tuple[int, int], turned: int, tmp_path: Path) -> None:
    """Those of a square weight fit either axis, and belong to its outputs."""
    weight = floats(*sizes) * np.exp(floats(sizes[1]))
    given = {"weight": np.ascontiguousarray(weight.T if turned else weight), "bias": floats(sizes[1])}
    base = made([node("Gemm", ["x", "weight", "bias"], ["y"], transB=turned, name="only")], given, ["rows", 8])
    x = floats(32, 8)
    model = quantised(base, "static by channel", x, tmp_path)
    before = run(model, x)
    for changed in (gg.lora(model, "*", rank=2), gg.qat(model)):
        assert np.abs(run(changed, x) - before).max() < np.ptp(before) / 200


HOWS = ["dynamic", "dynamic by channel", "static", "static by channel", "static QDQ"]


@pytest.mark.sweep(0.008)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["dense", "images"])
def test_integer_products_get_adapters_train_and_merge(name: str, how: str, tmp_path: Path) -> None:
    base, x = (DENSE, floats(32, 8)) if name == "dense" else (IMAGE, floats(32, 3, 6, 6))
    model = quantised(base, how, x, tmp_path)
    before = run(model, x)
    adapted = gg.lora(model, ["*first*", "*last*"], rank=2)
    exact = {t.name: t.raw_data for t in model.graph.initializer if t.data_type in (2, 3) and len(t.dims) > 1}
    kept = {t.name: t.raw_data for t in adapted.graph.initializer}
    assert len(exact) == 2 and all(kept[n] == data for n, data in exact.items())
    # a sum on a tie may round otherwise: one step of the output's scale
    step_size = np.ptp(before) / 200 if how.startswith("static") else 1e-4
    assert np.abs(run(adapted, x) - before).max() < step_size
    step = gg.build(adapted, "mse", gg.optim.adam(0.02))
    assert len(step.manifest.trainable) == 4
    trainer = gg.Trainer(step, device="cpu")
    target = before + 0.5 * floats(8 if name == "dense" else 1, 5)[:1]
    start = {n: a.copy() for n, a in trainer.state_dict().items()}
    history = trainer.fit({"x": x, "target": target}, epochs=60, batch_size=32, progress=False)
    assert history["loss"][-1] < 0.6 * history["loss"][0]
    assert all((trainer.state_dict()[n] != start[n]).any() for n in step.manifest.trainable)
    merged = surgery.merge_adapters(adapted, trainer.state_dict())
    after = trainer.predict(x)
    assert np.abs(run(merged, x) - after).max() < 3 * max(step_size, 1e-3)
    again = surgery.merge_adapters(adapted, trainer.state_dict(), requantise=True)
    stored = {t.name: t.data_type for t in again.graph.initializer}
    assert all(stored[n] in (2, 3) for n in exact)
    assert np.abs(run(again, x) - after).max() < 0.05 * np.ptp(after)


def test_data_are_rounded_as_they_were_and_gradients_pass() -> None:
    """Below a layer with rounded data, the gradient is that of the float product."""
    rng = np.random.default_rng(0)
    w = rng.integers(-64, 65, (8, 5), dtype=np.int8)
    nodes = [
        node("MatMul", ["x", "below.weight"], ["h"]),
        node("DynamicQuantizeLinear", ["h"], ["q", "s", "z"]),
        node("MatMulInteger", ["q", "w", "z"], ["i"], name="w"),
        node("Cast", ["i"], ["c"], to=1),
        node("Mul", ["s", "ws"], ["both"]),
        node("Mul", ["c", "both"], ["y"]),
    ]
    model = made(nodes, {"below.weight": floats(4, 8), "w": w, "ws": np.array(0.01, np.float32)}, ["rows", 4])
    x = floats(6, 4)
    adapted = gg.lora(model, "w", rank=2)
    np.testing.assert_allclose(run(adapted, x), run(model, x), rtol=1e-4, atol=1e-4)
    step = gg.build(adapted, "mse", gg.optim.sgd(1.0), train="below.weight")
    trainer = gg.Trainer(step, device="cpu")
    target = floats(6, 5)
    trainer.step({"x": x, "target": target})
    gradient = weights(model)["below.weight"] - trainer.state_dict()["below.weight"]
    error = 2 * (run(model, x) - target) / target.size
    np.testing.assert_allclose(gradient, x.T @ error @ (w * 0.01).T, rtol=1e-3, atol=1e-5)
    assert trained(adapted)


def test_sums_that_nothing_makes_floats_of_are_refused() -> None:
    nodes = [node("MatMulInteger", ["x", "w.weight"], ["i"], name="w"), node("Cast", ["i"], ["y"], to=1)]
    model = made(nodes, {"w.weight": np.ones((4, 5), np.uint8)}, ["rows", 4], onnx.TensorProto.UINT8)
    with pytest.raises(BuildError, match="without a Cast and Mul that convert its sums"):
        gg.lora(model, "w")
    odd = made([node("QAttention", ["x", "w.weight"], ["y"], name="w", domain="com.microsoft")],
               {"w.weight": np.ones((4, 5), np.uint8)}, ["rows", 4], onnx.TensorProto.UINT8)  # fmt: skip
    with pytest.raises(UnknownNameError, match="is QAttention, whose products are integers"):
        gg.lora(odd, "w")


# --- training through the rounding ------------------------------------------------------------------------------


@pytest.mark.sweep(0.2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranges", ["observed", "learned"])
@pytest.mark.parametrize("how", HOWS[:4])
@pytest.mark.parametrize("name", ["dense", "images"])
def test_integer_products_go_on_as_pairs(name: str, how: str, ranges: str, tmp_path: Path) -> None:
    base, x = (DENSE, floats(32, 8)) if name == "dense" else (IMAGE, floats(32, 3, 6, 6))
    model = quantised(base, how, x, tmp_path)
    before = run(model, x)
    rounded = gg.qat(model, ranges=ranges)
    step_size = np.ptp(before) / 200 if how.startswith("static") else 1e-4
    assert np.abs(run(rounded, x) - before).max() < step_size
    step = gg.build(rounded, "mse", gg.optim.adam(0.01))
    trained = {n for n in step.manifest.trainable if not n.endswith("_range")}
    assert trained == {t.name for t in base.graph.initializer}  # weights and biases, under the names that they had
    assert any(n.endswith("_range") for n in step.manifest.trainable) == (ranges == "learned")
    trainer = gg.Trainer(step, device="cpu")
    target = before + 0.5 * np.linspace(-1, 1, 5, dtype=np.float32)
    history = trainer.fit({"x": x, "target": target}, epochs=40, batch_size=32, progress=False)
    assert history["loss"][-1] < 0.6 * history["loss"][0]
    exported = trainer.export()
    apart = np.abs(run(exported, x) - trainer.predict(x))
    assert np.mean(apart < 1e-4 * np.ptp(before)) > 0.98 and apart.max() < 2 * step_size  # a value between two integers
    kinds = {t.name: t.data_type for t in model.graph.initializer if len(t.dims) > 1}
    assert kinds == {t.name: t.data_type for t in exported.graph.initializer if t.name in kinds}
    assert np.abs(run(gg.qat(exported), x) - run(exported, x)).max() < 1e-5  # and so on


@pytest.mark.sweep(0.41)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", HOWS[:4])
def test_a_new_head_and_the_integers_below_train(how: str, tmp_path: Path) -> None:
    x = floats(32, 3, 6, 6)
    model = gg.qat(gg.new_head(quantised(IMAGE, how, x, tmp_path), 3))
    step = gg.build(model, "cross_entropy", gg.optim.adam(0.02))
    assert set(step.manifest.trainable) == {"head.weight", "head.bias", "first.weight", "first.bias"}
    trainer = gg.Trainer(step, device="cpu")
    target = np.argmax(x[:, :, 0, 0], 1)
    history = trainer.fit({"x": x, "target": target}, epochs=60, batch_size=32, progress=False)
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    np.testing.assert_allclose(run(trainer.export(), x), trainer.predict(x), atol=1e-4)


def test_sums_that_onnxruntime_makes_floats_of_itself() -> None:
    """MatMulIntegerToFloat, as offline optimised models have it, with scales and zero points of one number each."""
    rng = np.random.default_rng(0)
    w = rng.integers(0, 255, (8, 5), dtype=np.uint8)
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        node("MatMulIntegerToFloat", ["q", "w", "s", "ws", "z", "wz", "b"], ["y"], name="w", domain="com.microsoft"),
    ]
    stored = {"w": w, "ws": np.array([0.01], np.float32), "wz": np.array([120], np.uint8), "b": floats(5)}
    model, x = made(nodes, stored, ["rows", 8]), floats(6, 8)
    adapted = gg.lora(model, "w", rank=2)
    np.testing.assert_allclose(run(adapted, x), run(model, x), rtol=1e-4, atol=1e-4)
    rounded = gg.qat(model)
    np.testing.assert_allclose(run(rounded, x), run(model, x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(weights(rounded)["w.float"], (w.astype(np.float32) - 120) * 0.01, atol=1e-6)


def test_channels_of_an_old_opset() -> None:
    """DequantizeLinear has an axis since opset 13; QLinearConv has channels since 10."""
    rng = np.random.default_rng(0)
    stored: dict[str, np.ndarray] = {
        "xs": np.array(0.02, np.float32), "xz": np.array(128, np.uint8),
        "w": rng.integers(-64, 65, (4, 3, 3, 3), dtype=np.int8), "ws": np.linspace(0.01, 0.02, 4, dtype=np.float32),
        "wz": np.zeros(4, np.int8), "b": rng.integers(-900, 900, 4).astype(np.int32),
        "ys": np.array(0.1, np.float32), "yz": np.array(128, np.uint8),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", ["x", "xs", "xz"], ["q"]),
        node("QLinearConv", ["q", "xs", "xz", "w", "ws", "wz", "ys", "yz", "b"], ["i"], name="conv"),
        node("DequantizeLinear", ["i", "ys", "yz"], ["y"]),
    ]
    model = made(nodes, stored, ["rows", 3, 6, 6])
    model.opset_import[0].version = 11
    x = floats(2, 3, 6, 6)
    for changed in (gg.qat(model), gg.lora(model, "w", rank=2)):
        assert np.abs(run(changed, x) - run(model, x)).max() < 0.11


@pytest.mark.parametrize("op_type", ["QAttention", "QLinearSoftmax", "DynamicQuantizeLSTM"])
def test_products_whose_floats_are_not_known_are_refused(op_type: str) -> None:
    odd = made([node(op_type, ["x", "w.weight"], ["y"], name="odd", domain="com.microsoft")],
               {"w.weight": np.ones((4, 5), np.uint8)}, ["rows", 4], onnx.TensorProto.UINT8)  # fmt: skip
    with pytest.raises(BuildError, match=f"'odd' is {op_type}, which computes in integers.*QDQ"):
        gg.qat(odd)

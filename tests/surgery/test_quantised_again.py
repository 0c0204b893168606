"""A quantised model goes on training: what it computes, what trains, and the pairs of an exported one."""

from __future__ import annotations

import json
import shutil
import subprocess
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph import frontend
from gradgraph.errors import BuildError, UnknownNameError
from gradgraph.frontend import nn

RNG = np.random.default_rng(0)
NODE_MODULES = Path(__file__).parents[2] / "examples" / "node" / "node_modules"
PLAIN = ort.SessionOptions()
PLAIN.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
X = RNG.normal(size=(16, 8)).astype(np.float32)
SCALES = {
    "tensor": (np.float32(0.02), {}),
    "channel": (RNG.uniform(0.01, 0.03, 6).astype(np.float32), {"axis": 1}),
    "block": (
        RNG.uniform(0.01, 0.03, (3, 6)).astype(np.float32),
        {"axis": 0, "block_size": 3},
    ),  # the last one is short
}
KINDS = {
    "int8": (np.int8, (-64, 65)),  # larger ones saturate on some processors
    "int8 of 8 bits": (np.int8, (-128, 128)),
    "uint8": (np.uint8, (0, 256)),
    "int16": (np.int16, (-200, 200)),
    "int4": (ml_dtypes.int4, (-8, 8)),
    "uint4": (ml_dtypes.uint4, (0, 16)),
}


def shipped(kind: str, scales: str, zero: bool = True, biased: bool = True) -> onnx.ModelProto:
    """A MatMul of rounded data by a weight that is stored as integers, and a bias of 32 bits as Gemm takes it."""
    dtype, (low, high) = KINDS[kind]
    scale, axis = SCALES[scales]
    stored = {
        "w_quantized": RNG.integers(low, high, (8, 6)).astype(dtype),
        "w_scale": scale,
        "x_scale": np.float32(0.03),
        "x_zero": np.uint8(120),
    }
    points = np.full(scale.shape, (low + high) // 2).astype(dtype)
    if zero:
        stored["w_zero"] = points
    node = helper.make_node
    nodes = [
        node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_q"]),
        node("DequantizeLinear", ["x_q", "x_scale", "x_zero"], ["x_d"]),
        node("DequantizeLinear", ["w_quantized", "w_scale", *(["w_zero"] if zero else [])], ["w_d"], **axis),
    ]
    if biased:
        stored["b_quantized"] = RNG.integers(-900, 900, 6).astype(np.int32)
        stored["b_scale"] = stored["x_scale"] * (scale if scales == "channel" else np.float32(0.02))
        nodes.append(node("DequantizeLinear", ["b_quantized", "b_scale"], ["b"], axis=0))
    nodes.append(node("Gemm", ["x_d", "w_d", *(["b"] if biased else [])], ["y"]))
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, ["rows", 8])],
        [helper.make_tensor_value_info("y", 1, ["rows", 6])],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in stored.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(model: onnx.ModelProto, x: np.ndarray = X) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), PLAIN, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    return y


def kinds(model: onnx.ModelProto) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {t.name: (t.data_type, tuple(t.dims)) for t in model.graph.initializer}


def pairs(model: onnx.ModelProto) -> list[str]:
    return sorted(n.op_type for n in model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear"))


@pytest.mark.sweep(0.32)
@pytest.mark.parametrize(
    ("kind", "scales", "ranges"),
    [
        ("int8", "tensor", "learned"),
        ("int8", "channel", "observed"),
        ("uint8", "tensor", "observed"),
        ("uint8", "channel", "learned"),
        ("int16", "channel", "observed"),
        ("int4", "block", "observed"),
        ("int4", "channel", "learned"),
        ("uint4", "block", "learned"),
    ],
)
def test_it_begins_where_it_was_and_ends_in_the_same_form(kind: str, scales: str, ranges: str) -> None:
    model = shipped(kind, scales)
    trainer = gg.Trainer(gg.build(gg.qat(model, ranges=ranges), "mse", gg.optim.adam(1e-2)), device="cpu")
    np.testing.assert_allclose(trainer.predict(X), run(model), rtol=1e-5, atol=1e-5)
    learned = {"w_range", "x_range"} if ranges == "learned" else set()
    assert set(trainer.manifest.trainable) == {"w", "b"} | learned
    data = {"x": X, "target": RNG.normal(size=(16, 6)).astype(np.float32)}
    before = trainer.evaluate(data)["loss"]
    trainer.fit(data, epochs=30, batch_size=16, progress=False)
    assert trainer.evaluate(data)["loss"] < 0.95 * before
    exported = trainer.export()
    onnx.checker.check_model(exported, full_check=True)
    assert kinds(exported) == kinds(model)
    assert pairs(exported) == pairs(model)
    np.testing.assert_allclose(run(exported), trainer.predict(X), rtol=1e-4, atol=1e-4)
    again = gg.Trainer(gg.build(gg.qat(exported), "mse", gg.optim.sgd(0.05)), device="cpu")
    np.testing.assert_allclose(again.predict(X), run(exported), rtol=1e-4, atol=1e-4)


def test_integers_without_a_zero_point_and_data_that_are_float() -> None:
    model = shipped("int8 of 8 bits", "channel", zero=False, biased=False)
    del model.graph.node[:2]
    model.graph.node[-1].input[0] = "x"
    trainer = gg.Trainer(gg.build(gg.qat(model), "mse", gg.optim.sgd(0.1)), device="cpu")
    trainer.fit({"x": X, "target": RNG.normal(size=(16, 6)).astype(np.float32)}, epochs=3, progress=False)
    exported = trainer.export()
    assert kinds(exported)["w_quantized"] == (TensorProto.INT8, (8, 6))
    assert pairs(exported) == ["DequantizeLinear"]
    np.testing.assert_allclose(run(exported), trainer.predict(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "low", "high"), [("int8", -64, 64), ("int8 of 8 bits", -128, 127)])
@pytest.mark.parametrize("scales", SCALES)
def test_the_gradients_of_learned_ranges_are_those_of_lsq(scales: str, kind: str, low: int, high: int) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch computes the same formula")

    def counted(s: torch.Tensor, n: float, largest: int) -> torch.Tensor:
        return s.detach() + (s - s.detach()) / np.sqrt(n * largest)

    def rounded(x: torch.Tensor, s: torch.Tensor, z: int, low: int, high: int) -> torch.Tensor:
        v = x / s
        return (torch.clamp((v.round() - v).detach() + v + z, low, high) - z) * s

    model = shipped(kind, scales, biased=False)
    parts = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    target = RNG.normal(size=(16, 6)).astype(np.float32)
    x = X * 2  # some of them lie beyond the range
    made = gg.qat(model, ranges="learned")
    weight = next(t for t in made.graph.initializer if t.name == "w")
    moved = numpy_helper.to_array(weight) + RNG.uniform(-0.03, 0.03, (8, 6)).astype(np.float32)
    weight.CopyFrom(numpy_helper.from_array(moved, "w"))
    trainer = gg.Trainer(gg.build(made, "mse", gg.optim.sgd(1.0)), device="cpu")
    w = torch.tensor(trainer.state_dict()["w"], requires_grad=True)
    trainer.step({"x": x, "target": target})
    s, t = (torch.tensor(parts[n], requires_grad=True) for n in ("w_scale", "x_scale"))
    spread = s
    if scales == "block":
        spread = s.repeat_interleave(3, 0)[:8]
    layer = rounded(w, counted(spread, 48 / s.numel(), high), 0, low, high)
    y = rounded(torch.tensor(x), counted(t, 8, 255), 120, 0, 255) @ layer
    torch.nn.functional.mse_loss(y, torch.tensor(target)).backward()
    state = trainer.state_dict()
    for name, scale in (("w_range", s), ("x_range", t)):
        expected = -(scale.grad / scale).detach().numpy()
        np.testing.assert_allclose(state[name], expected, rtol=3e-3, atol=1e-5)
    np.testing.assert_allclose(state["w"], (w - w.grad).detach().numpy(), rtol=1e-4, atol=1e-5)


def mobile_net() -> onnx.ModelProto:
    """Inverted residuals with convolutions of single channels, as in MobileNetV2."""

    class Block(nn.Module):
        def __init__(self, inner: int) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Conv2d(8, inner, 1), nn.Conv2d(inner, 8, 1)
            self.deep = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)

        def forward(self, x: frontend.Tensor) -> frontend.Tensor:
            relu6 = nn.ReLU6()
            return x + self.narrow(relu6(self.deep(relu6(self.wide(x)))))

    layers = (nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU6(), Block(16), Block(16), nn.AdaptiveAvgPool2d(1))
    return frontend.export(nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 10)), {"x": ("rows", 3, 12, 12)})


@pytest.mark.sweep(0)
@pytest.mark.parametrize("per_channel", [True, False])
def test_what_quantize_static_writes_gets_a_head_trains_and_runs_in_node(per_channel: bool, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    rng = np.random.default_rng(3)
    x = rng.normal(size=(64, 3, 12, 12)).astype(np.float32)
    y = rng.integers(0, 3, 64)
    x[np.arange(64), y] += 0.7  # the class is the brightest channel

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter([{"x": x[:32]}])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.batches, None)

    onnx.save(mobile_net(), tmp_path / "float.onnx")
    quantize_static(tmp_path / "float.onnx", tmp_path / "int8.onnx", Reader(), quant_format=QuantFormat.QDQ,
                    per_channel=per_channel, reduce_range=True, weight_type=QuantType.QInt8)  # fmt: skip
    headed = gg.new_head(tmp_path / "int8.onnx", 3)
    step = gg.build(gg.qat(headed), "cross_entropy", gg.optim.adam(3e-3))
    trainer = gg.Trainer(step, device="cpu")
    assert {"head.weight", "head.bias", "0.weight", "2.deep.weight", "2.deep.bias"} <= set(step.manifest.trainable)
    assert len(step.manifest.trainable) == 16
    np.testing.assert_allclose(trainer.predict(x), run(headed, x), atol=0.15)  # its kernels round sums of integers
    start = trainer.state_dict()
    trainer.fit({"x": x, "target": y}, epochs=8, batch_size=16, progress=False)
    assert all(np.abs(trainer.state_dict()[n] - start[n]).max() > 1e-3 for n in step.manifest.trainable)
    assert trainer.evaluate({"x": x, "target": y})["accuracy"] > 0.9
    exported = trainer.export(tmp_path / "mine.onnx")
    before, after = ({n: k for n, k in kinds(m).items() if k[1]} for m in (headed, exported))
    assert after == before  # but for single zero points: an average pool of int8 is written as one of uint8
    assert pairs(exported) == pairs(headed)
    session = ort.InferenceSession(tmp_path / "mine.onnx", providers=["CPUExecutionProvider"])
    (here,) = session.run(None, {"x": x})
    assert (here.argmax(1) == y).mean() == trainer.evaluate({"x": x, "target": y})["accuracy"]
    there = in_node(tmp_path / "mine.onnx", x, tmp_path)
    np.testing.assert_allclose(there, here, atol=1e-4)


def in_node(model: Path, x: np.ndarray, folder: Path) -> np.ndarray:
    if shutil.which("node") is None or not (NODE_MODULES / "onnxruntime-node").is_dir():
        pytest.skip("onnxruntime-node is not installed: make node")
    (folder / "node_modules").symlink_to(NODE_MODULES)
    (folder / "x.json").write_text(json.dumps(x.ravel().tolist()))
    (folder / "run.mjs").write_text(
        "import ort from 'onnxruntime-node'; import { readFileSync } from 'node:fs';"
        f"const x = Float32Array.from(JSON.parse(readFileSync('x.json'))), dims = {list(x.shape)};"
        f"const session = await ort.InferenceSession.create('{model.name}');"
        "const [y] = Object.values(await session.run({ x: new ort.Tensor('float32', x, dims) }));"
        "console.log(JSON.stringify([...y.data]));"
    )
    done = subprocess.run(["node", "run.mjs"], capture_output=True, text=True, timeout=120, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return np.array(json.loads(done.stdout), np.float32).reshape(len(x), -1)


def two_layers() -> onnx.ModelProto:
    network = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    step = gg.build(gg.qat(frontend.export(network, {"x": ("rows", 8)}), {"x": X}), "mse")
    return gg.Trainer(step, device="cpu").export()


def test_a_target_says_which_layers_go_on() -> None:
    model = two_layers()
    some = gg.build(gg.qat(model, target="2"), "mse")
    assert set(some.manifest.trainable) == {"2.weight", "0.bias", "2.bias"}
    assert kinds(gg.Trainer(some, device="cpu").export())["0.weight_quantized"][0] == TensorProto.INT8


def test_a_new_head_is_rounded_if_it_is_named() -> None:
    headed = gg.new_head(two_layers(), 3)
    plain = gg.Trainer(gg.build(gg.qat(headed), "mse"), device="cpu").export()
    assert kinds(plain)["head.weight"][0] == TensorProto.FLOAT
    named = gg.qat(headed, target=["head", "0"])  # the data that it takes are rounded already
    exported = gg.Trainer(gg.build(named, "mse"), device="cpu").export()
    assert kinds(exported)["head.weight_quantized"][0] == kinds(exported)["0.weight_quantized"][0] == TensorProto.INT8


def test_what_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="no layer with a stored weight matches 'z'"):
        gg.qat(shipped("int8", "tensor"), target="z")
    model = shipped("int8", "tensor", biased=False)
    model.graph.node[-1].CopyFrom(helper.make_node("MatMulInteger", ["x_q", "w_quantized"], ["y"], name="product"))
    with pytest.raises(BuildError, match=r"'product' is MatMulInteger.*QDQ"):
        gg.qat(model)

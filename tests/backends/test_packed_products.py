"""On onnxruntime's CPU provider, weights of 4 and 8 bits are multiplied as they are stored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph.backends import BACKENDS
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_cpu import packed_products
from gradgraph.backends.ort_cpu.cpu_lowering import packing
from gradgraph.files import large_weights
from gradgraph.runtime.execution.predictor import Predictor
from gradgraph.step import folder as step_folder

K, N = 128, 24


def network(bits: int, block: int, points: bool | str, times: int = 1, rows: int = N) -> onnx.ModelProto:
    """A trained layer, and behind it products with one packed weight."""
    rng = np.random.default_rng(bits + block)
    blocks = K // block
    draw = lambda *sizes: rng.integers(0, 256, sizes, np.uint8)  # noqa: E731
    weights = {
        "w": rng.normal(size=(5, K)).astype(np.float32),
        "packed": draw(rows, blocks, block * bits // 8),
        "scales": rng.uniform(0.01, 0.1, (rows * blocks)).astype(np.float32),
        **({"points": draw(rows * -(-blocks * bits // 8))} if points else {}),
    }
    if points == "float":
        weights["points"] = rng.uniform(0, 2**bits, (rows, blocks)).astype(np.float32)
    names = ["packed", "scales", *(["points"] if points else [])]
    sizes = {"K": K, "N": rows, "bits": bits, "block_size": block}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"])]
    nodes += [
        helper.make_node("MatMulNBits", ["h", *names], [f"y{i}"], domain="com.microsoft", **sizes) for i in range(times)
    ]
    nodes.append(helper.make_node("Sum", [f"y{i}" for i in range(times)], ["y"]))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", TensorProto.FLOAT, ["rows", 5])],
                              [value("y", TensorProto.FLOAT, ["rows", rows])],
                              [numpy_helper.from_array(a, n) for n, a in weights.items()])  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def kinds(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


@pytest.mark.sweep(0.17)
@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"bits": 4, "block": 32, "points": False}, True),
        ({"bits": 4, "block": 32, "points": True}, True),
        ({"bits": 4, "block": 16, "points": True, "times": 2}, True),
        ({"bits": 8, "block": 32, "points": False}, True),
        ({"bits": 8, "block": 64, "points": True}, True),
        ({"bits": 4, "block": 128, "points": False}, True),
        ({"bits": 4, "block": 32, "points": "float"}, True),
        ({"bits": 4, "block": 128, "points": "float", "times": 2}, True),
        ({"bits": 4, "block": 128, "points": True}, False),  # a zero point takes half a byte of a row of its own
    ],
    ids=str,
)
def test_they_are_read_as_they_are_stored(given: dict[str, Any], taken: bool) -> None:
    model = network(**given)
    step = gg.build(model, "mse", gg.optim.sgd(0.1), train="w")
    for saved in (step.train, step.eval):
        lowered = for_machine(saved, BACKENDS["ort-cpu"], {"rows": 3})
        assert ("MatMulNBits" in kinds(lowered)) is taken and "MatMulNBits" not in kinds(saved)
    assert ("DequantizeLinear" in kinds(lowered)) is not taken
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    expected = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    trainer = gg.Trainer(step, device="cpu")
    np.testing.assert_allclose(trainer.predict(x), expected, rtol=1e-4, atol=1e-4)
    data = {"x": x, "target": np.zeros((3, N), np.float32)}
    assert float(trainer.step(data)["loss"]) == pytest.approx(np.square(expected).mean(), rel=1e-4)
    w = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "w")
    plain = gg.build(model, "mse", gg.optim.sgd(0.1), train="w", backend="portable")
    session = ort.InferenceSession(plain.resolved("train").SerializeToString())
    found = session.run(["w.next"], {**data, "w": w, "learning_rate": np.array(0.1, np.float32)})[0]
    np.testing.assert_allclose(trainer.state_dict()["w"], found, rtol=1e-4, atol=1e-6)


@pytest.fixture
def short_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_products, "STRIP", 10 * K)  # three strips, the last one shorter


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize(
    "given",
    [
        {"bits": 4, "block": 32, "points": False},
        {"bits": 4, "block": 32, "points": True},
        {"bits": 8, "block": 16, "points": True},
        {"bits": 4, "block": 128, "points": True},
        {"bits": 4, "block": 32, "points": True, "times": 2},
    ],
    ids=str,
)
def test_a_few_rows_at_a_time_give_the_same(given: dict[str, Any], copied: bool, short_strips: None) -> None:
    model = network(**given)
    step = gg.build(model, "mse", gg.optim.sgd(0.1), train="w")
    trainer = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(pack_weights=copied))
    lowered = for_machine(step.train, packing(BACKENDS["ort-cpu"], copied), {"rows": 3})
    assert set(rows_made(lowered)) == {10, 4}  # of the weight's 24
    assert ("MatMulNBits" in kinds(lowered)) is (copied and given["block"] < K)
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    expected = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(trainer.predict(x), expected, rtol=1e-4, atol=1e-4)
    data = {"x": x, "target": np.zeros((3, N), np.float32)}
    trainer.step(data)
    portable = gg.build(model, "mse", gg.optim.sgd(0.1), train="w", backend="portable").resolved("train")
    w = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "w")
    feeds = {**data, "w": w, "learning_rate": np.array(0.1, np.float32)}
    found = ort.InferenceSession(portable.SerializeToString()).run(["w.next"], feeds)[0]
    np.testing.assert_allclose(trainer.state_dict()["w"], found, rtol=1e-4, atol=1e-6)


def layers(count: int) -> onnx.ModelProto:
    """A trained layer, and behind it ``count`` layers with packed weights of their own."""
    rng, nodes = np.random.default_rng(0), [helper.make_node("MatMul", ["x", "w"], ["h0"])]
    weights = {"w": rng.normal(size=(5, K)).astype(np.float32)}
    for i in range(count):
        weights[f"q{i}"] = rng.integers(0, 256, (K, K // 32, 16), np.uint8)
        weights[f"s{i}"] = rng.uniform(0.01, 0.02, K * K // 32).astype(np.float32)
        nodes += [helper.make_node("MatMulNBits", [f"h{i}", f"q{i}", f"s{i}"], [f"p{i}"], domain="com.microsoft",
                                   K=K, N=K, bits=4, block_size=32),
                  helper.make_node("Tanh", [f"p{i}"], [f"h{i + 1}"])]  # fmt: skip
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", TensorProto.FLOAT, ["rows", 5])],
                              [value(f"h{count}", TensorProto.FLOAT, ["rows", K])],
                              [numpy_helper.from_array(a, n) for n, a in weights.items()])  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def test_recomputed_products_keep_no_float_weights(short_strips: None) -> None:
    """Strips of the forward pass would otherwise stay in memory for the recomputed products, which are equal nodes."""
    data = {"x": np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32), "target": np.ones((3, K), np.float32)}
    losses = []
    for keep in (None, ["h2", "h4"]):
        step = gg.build(layers(6), "mse", gg.optim.sgd(0.1), train="w", recompute=keep)
        trainer = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(pack_weights=False))
        losses.append([float(trainer.step(data)["loss"]) for _ in range(3)])
    np.testing.assert_allclose(*losses, rtol=1e-6)
    lowered = for_machine(step.train, packing(BACKENDS["ort-cpu"], False), {"rows": 3})
    assert sum(n.op_type == "MatMul" and n.name.startswith("again/") for n in lowered.graph.node) >= 2
    readers: dict[str, set[str]] = {}
    for node in reversed(lowered.graph.node):
        for name in node.input:
            made = (
                {node.name} if node.op_type == "MatMul" else set().union(*(readers.get(y, set()) for y in node.output))
            )
            readers[name] = readers.get(name, set()) | made
    strips = [readers[n.output[0]] for n in lowered.graph.node if n.op_type == "DequantizeLinear"]
    assert len(strips) > 6 * 13 and all(len(products) == 1 for products in strips)


@pytest.mark.sweep(0.6)
@pytest.mark.parametrize("points", [False, True, "float"])
@pytest.mark.parametrize(("bits", "block"), [(4, 32), (4, 16), (8, 64)])
def test_zero_points_may_lie_beside_the_step(
    bits: int, block: int, points: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a large table of words do. What lowers the step does not read them, wherever the process stands."""
    for module in (step_folder, large_weights):
        monkeypatch.setattr(module, "LEAST_BYTES", 1000)
        monkeypatch.setattr(module, "LEAST_KEPT", 1000)
    step = gg.build(network(bits, block, points, rows=600), "mse", gg.optim.sgd(0.1), train="w")
    step.save(tmp_path / "step")
    saved = gg.Step.load(tmp_path / "step").train
    read = {name for node in saved.graph.node if node.op_type == "DequantizeLinear" for name in node.input}
    assert all(t.data_location == TensorProto.EXTERNAL for t in saved.graph.initializer if t.name in read)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "frozen.bin").write_bytes(bytes(1 << 16))
    data = {
        "x": np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32),
        "target": np.zeros((3, 600), np.float32),
    }
    memory, disk = (gg.Trainer(s, device="cpu") for s in (step, tmp_path / "step"))
    for _ in range(2):
        assert disk.step(data)["loss"] == pytest.approx(memory.step(data)["loss"], rel=1e-5)
    np.testing.assert_allclose(disk.predict(data["x"]), memory.predict(data["x"]), rtol=1e-4, atol=1e-4)


def rows_made(model: onnx.ModelProto) -> list[int]:
    """How many rows of the weight each DequantizeLinear writes."""
    sizes = {t.name: math.prod(t.dims) for t in model.graph.initializer}
    return [sizes[n.input[0]] // K for n in model.graph.node if n.op_type == "DequantizeLinear"]


def stored(kind: int, axis: int, block: int, turned: bool) -> onnx.ModelProto:
    """``y = x · W``, or of its transpose, with stored numbers; the scales are for blocks, lines of an axis, or all."""
    rng = np.random.default_rng(kind)
    sizes = (N, K) if turned else (K, N)
    low, high = {TensorProto.INT4: (-8, 8), TensorProto.UINT4: (0, 16), TensorProto.INT8: (-128, 128)}.get(
        kind, (0, 256)
    )
    scales = [1] if block == 1 else [sizes[axis]]
    if block > 1:
        scales = [s // block if i == axis else s for i, s in enumerate(sizes)]
    attributes = {"axis": axis} | ({"block_size": block} if block > 1 else {})
    numbers = helper.make_tensor("q", kind, sizes, rng.integers(low, high, sizes).reshape(-1))
    weights = {"s": rng.uniform(0.01, 0.1, scales if block != 1 else ()).astype(np.float32),
               "bias": np.ones(N, np.float32)}  # fmt: skip
    nodes = [helper.make_node("DequantizeLinear", ["q", "s"], ["w"], **({} if block == 1 else attributes))]
    if turned:
        nodes.append(helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]))
    nodes.append(helper.make_node("MatMul", ["x", "wt" if turned else "w"], ["product"]))
    nodes.append(helper.make_node("Add", ["product", "bias"], ["y"]))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", TensorProto.FLOAT, ["rows", K])],
                              [value("y", TensorProto.FLOAT, ["rows", N])],
                              [numbers, *(numpy_helper.from_array(a, n) for n, a in weights.items())])  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.sweep(0.106)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("block", [0, 1, 8, 16, 32], ids=lambda b: {0: "lines", 1: "all"}.get(b, f"blocks of {b}"))
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", ["INT4", "UINT4", "INT8", "UINT8"])
def test_what_stored_weights_multiply_is_not_rounded(kind: str, axis: int, block: int, turned: bool) -> None:
    """Onnxruntime reads such weights by MatMulNBits where it can, and by default rounds the other factor to 8 bits."""
    if block > 1 and (N, K)[axis if turned else 1 - axis] % block:
        pytest.skip("24 lines are no whole number of such blocks")
    model = stored(getattr(TensorProto, kind), axis, block, turned)
    x = np.random.default_rng(0).normal(size=(3, K)).astype(np.float32)
    expected = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})[0]
    trainer = gg.Trainer(gg.build(model, "mse", train="bias"), device="cpu")
    np.testing.assert_allclose(trainer.predict(x), expected, rtol=1e-4, atol=1e-4)
    loss = trainer.step({"x": x, "target": np.zeros((3, N), np.float32)})["loss"]
    assert float(loss) == pytest.approx(np.square(expected).mean(), rel=1e-4)


def by_channel(kind: type, axis: int | None, points: str, op: str) -> onnx.ModelProto:
    """A trained layer, and behind it a product with a weight of 8 bits that has a scale per row, column or tensor.

    ``points`` is "none", "equal" or "different"; ``op`` is MatMul, Gemm, or GemmT for a transposed weight.
    """
    rng, limits, is_turned = np.random.default_rng(7), np.iinfo(kind), op == "GemmT"
    shape = (N, K) if is_turned else (K, N)
    sizes = () if axis is None else (shape[axis],)
    draw = lambda *dims: rng.integers(limits.min, limits.max + 1, dims).astype(kind)  # noqa: E731
    weights = {
        "a": rng.normal(size=(5, K)).astype(np.float32),
        "w": draw(*shape),
        "s": rng.uniform(0.001, 0.02, sizes).astype(np.float32),
        **(
            {"z": draw(*sizes)}
            if points == "different"
            else {"z": np.full(sizes, 3, kind)}
            if points == "equal"
            else {}
        ),
        **({} if op == "MatMul" else {"c": rng.normal(size=N).astype(np.float32)}),
    }
    read = ["w", "s", *(["z"] if "z" in weights else [])]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("DequantizeLinear", read, ["d"], **({} if axis is None else {"axis": axis})),
        helper.make_node("MatMul", ["h", "d"], ["y"])
        if op == "MatMul"
        else helper.make_node("Gemm", ["h", "d", "c"], ["y"], transB=int(is_turned)),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", TensorProto.FLOAT, ["rows", 5])],
                              [value("y", TensorProto.FLOAT, ["rows", N])],
                              [numpy_helper.from_array(v, n) for n, v in weights.items()])  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def computed(model: onnx.ModelProto, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The output in float64, and the first layer's weight after a step of gradient descent on the mean of squares."""
    held = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    axis = next((a.i for n in model.graph.node if n.op_type == "DequantizeLinear" for a in n.attribute), 0)
    along = (-1, 1) if axis == 0 and held["s"].ndim else (-1,) if held["s"].ndim else ()
    w = (held["w"] - held.get("z", np.zeros(held["s"].shape)).reshape(along)) * held["s"].reshape(along)
    w = w if w.shape == (K, N) else w.T
    y = x @ held["a"] @ w + held.get("c", 0.0)
    return y, held["a"] - 0.1 * x.T @ (2 * y / y.size) @ w.T


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("op", ["MatMul", "Gemm", "GemmT"])
@pytest.mark.parametrize("points", ["none", "equal", "different"])
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_a_scale_per_row_column_or_tensor(
    kind: type, axis: int | None, points: str, op: str, short_strips: None
) -> None:
    model = by_channel(kind, axis, points, op)
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    y, w = computed(model, x)
    step = gg.build(model, "mse", gg.optim.sgd(0.1), train="a")
    lowered = for_machine(step.train, BACKENDS["ort-cpu"], {"rows": 3})
    assert len(rows_made(lowered)) > 1
    for native in (False, True):
        trainer = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(native_kernels=native))
        np.testing.assert_allclose(trainer.predict(x), y, rtol=1e-4, atol=1e-4)
        trainer.step({"x": x, "target": np.zeros((3, N), np.float32)})
        np.testing.assert_allclose(trainer.state_dict()["a"], w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_a_predictor_multiplies_them_too(packs: bool, known: bool) -> None:
    """It runs a model as it is in its file: zero points in Constant nodes, and perhaps no shapes."""
    model = by_channel(np.int8, 1, "none", "MatMul")
    zeros = numpy_helper.from_array(np.zeros(N, np.int8))
    model.graph.node.insert(0, helper.make_node("Constant", [], ["z"], value=zeros))
    model.graph.node[2].input.append("z")
    if known:
        model = onnx.shape_inference.infer_shapes(model)
    read = ir.from_proto(model)
    changed = packed_products.with_stored_weights(read, packs)
    (made,) = [n for n in changed.graph if n.op_type == "DequantizeLinear"]
    assert [n.op_type for n in made.outputs[0].consumers()] == ["Reshape"]
    assert [n.op_type for n in read.graph] == ["Constant", "MatMul", "DequantizeLinear", "MatMul"]
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    found = Predictor(read, device="cpu", packs=packs)({"x": x})["y"]
    np.testing.assert_allclose(found, computed(model, x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("opset", [10, 12, 13, 23])
def test_a_predictor_runs_models_of_any_opset(opset: int, packs: bool) -> None:
    """It does not convert them; DequantizeLinear has no axis before opset 13, and a type of its own from 23 on."""
    model = by_channel(np.int8, None, "equal", "MatMul")
    model.opset_import[0].version = opset
    x, tolerance = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32), 1e-4
    expected = computed(model, x)[0]
    if opset == 23:
        model.graph.node[1].attribute.append(helper.make_attribute("output_dtype", TensorProto.FLOAT16))
        model.graph.node.insert(1, helper.make_node("Cast", ["h"], ["h16"], to=TensorProto.FLOAT16))
        model.graph.node[3].input[0] = "h16"
        model.graph.output[0].type.tensor_type.elem_type, tolerance = TensorProto.FLOAT16, 1e-2
    found = Predictor(ir.from_proto(model), device="cpu", packs=packs)({"x": x})["y"]
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_packed_integers_that_are_an_output_stay_bytes() -> None:
    model = network(4, 32, False)
    made = {"packed": (TensorProto.UINT8, [N, 4, 16]), "scales": (TensorProto.FLOAT, [N * 4])}
    model.graph.output.extend(helper.make_tensor_value_info(n, *kind) for n, kind in made.items())
    trainer = gg.Trainer(gg.build(model, "mse", gg.optim.sgd(0.1), train="w", output="y"), device="cpu")
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    expected = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    for (name, found), y in zip(trainer.predict(x).items(), expected, strict=True):
        assert found.dtype == y.dtype, name
        np.testing.assert_allclose(found, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("axis", "points"), [(1, "different"), (1, "equal"), (None, "equal"), (0, "different")])
@pytest.mark.parametrize("op", ["MatMul", "GemmT"])
def test_zero_points_of_columns_may_lie_in_another_file(axis: int | None, points: str, op: str, tmp_path: Path) -> None:
    model = by_channel(np.uint8, axis, points, op)
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    expected = computed(model, x)[0]
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    read = ir.load(tmp_path / "m.onnx")
    assert all(isinstance(v.const_value, ir.ExternalTensor) for v in read.graph.initializers.values())
    changed = packed_products.with_stored_weights(read, copied=False)
    (made,) = [n for n in changed.graph if n.op_type == "DequantizeLinear" and n.inputs[0].name.startswith("w")]
    assert [n.op_type for n in made.outputs[0].consumers()] == ["Reshape"]
    found = Predictor(read, device="cpu")({"x": x})["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)

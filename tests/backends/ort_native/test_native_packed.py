"""Products with weights of 4 and 8 bits, read as they are stored, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_native import ORT_NATIVE
from gradgraph.backends.ort_native import library as native
from gradgraph.files.held_files import HeldFile
from gradgraph.runtime.execution.frozen_weights import FrozenWeights
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session

pytestmark = pytest.mark.usefixtures("by_vectors")

CPU = Placement(("CPUExecutionProvider",))
KINDS = {
    TensorProto.UINT4: (ml_dtypes.uint4, 0, 16),
    TensorProto.INT4: (ml_dtypes.int4, -8, 8),
    TensorProto.UINT8: (np.uint8, 0, 256),
    TensorProto.INT8: (np.int8, -128, 128),
}


def network(kind: int, rows: int, columns: int, block: int, points: bool, axes: int) -> tuple[Any, np.ndarray]:
    """``y = x·Wᵀ`` and ``z = v·W`` of one stored weight, and W in float64."""
    rng = np.random.default_rng(rows + columns)
    dtype, low, high = KINDS[kind]
    draw = lambda *sizes: rng.integers(low, high, sizes).astype(dtype)  # noqa: E731
    blocks = (rows, columns // block)
    weights = {"q": draw(rows, columns), "s": rng.uniform(0.01, 0.1, blocks).astype(np.float32)}
    weights |= {"p": draw(*blocks)} if points else {}
    nodes = [
        helper.make_node("DequantizeLinear", list(weights), ["w"], axis=1, block_size=block),
        helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "wt"], ["y"]),
        helper.make_node("MatMul", ["v", "w"], ["z"]),
    ]
    value = lambda name, size: helper.make_tensor_value_info(name, TensorProto.FLOAT, [*"ab"[: axes - 1], size])  # noqa: E731
    inputs, outputs = [value("x", columns), value("v", rows)], [value("y", rows), value("z", columns)]
    stored = [numpy_helper.from_array(a, n) for n, a in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    zero = np.repeat(weights["p"].astype(np.float64), block, 1) if points else 0.0
    return model, (weights["q"].astype(np.float64) - zero) * np.repeat(weights["s"].astype(np.float64), block, 1)


def computed(model: onnx.ModelProto, threads: int, **feeds: np.ndarray) -> list[np.ndarray]:
    session = create_session(model, CPU, RuntimeOptions(native_kernels=True, threads=threads))
    return list(session.run(None, feeds))


@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=TensorProto.DataType.Name)
@pytest.mark.parametrize(
    ("rows", "columns", "block", "samples"),
    [
        (1, 16, 16, (1,)),
        (50, 96, 32, (7,)),  # neither is a whole number of panels
        (49, 288, 48, (2, 9)),
        (800, 304, 16, (130,)),  # several panels of rows, an odd number of blocks, terms beyond one sum
        (97, 640, 128, (0,)),
        (33, 768, 256, (17,)),
    ],
)
def test_both_ways_are_those_of_floats(
    kind: int, points: bool, rows: int, columns: int, block: int, samples: tuple[int, ...]
) -> None:
    model, w = network(kind, rows, columns, block, points, len(samples) + 1)
    lowered = for_machine(model, ORT_NATIVE)
    assert {node.op_type for node in lowered.graph.node} == {"PackedMatMul"}
    assert len(lowered.graph.initializer) == 2 + points  # both products read the same
    rng = np.random.default_rng(0)
    x, v = (rng.normal(size=(*samples, n)).astype(np.float32) for n in (columns, rows))
    found = computed(lowered, 1, x=x, v=v)
    for y, a, b in zip(found, (x, v), (w.T, w), strict=True):
        a = a.astype(np.float64)
        assert y.shape == (*samples, b.shape[1])
        assert (np.abs(y - a @ b) <= 1e-6 * (np.abs(a) @ np.abs(b)) + 1e-37).all()
    for y, other in zip(found, computed(lowered, 2, x=x, v=v), strict=True):
        np.testing.assert_array_equal(y, other)


class Given:
    """The settings of a session, and which initializers it was given to copy."""

    def __init__(self) -> None:
        self.settings, self.copied = ort.SessionOptions(), list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.settings, name)

    def add_external_initializers(self, names: list[str], values: list[ort.OrtValue]) -> None:
        self.copied += names
        self.settings.add_external_initializers(names, values)


@pytest.mark.parametrize("state", ["in place", "replaced", "removed"])
def test_a_session_does_not_copy_what_lies_in_a_file(state: str, library: native.Library, tmp_path: Path) -> None:
    """It reads integers and scales where they are mapped; a float weight of a product is still packed.

    It reads that from its file, and all weights from memory if another file has replaced this one, or there is none.
    """
    model, w = network(TensorProto.UINT4, 320, 256, 32, False, 2)
    model.graph.node.append(helper.make_node("MatMul", ["x", "f"], ["n"]))
    model.graph.output.append(helper.make_tensor_value_info("n", TensorProto.FLOAT, ["a", 64]))
    floats = np.random.default_rng(1).normal(size=(256, 64)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(floats, "f"))
    lowered = for_machine(model, ORT_NATIVE)
    stored = {t.name for t in lowered.graph.initializer}
    onnx.save(lowered, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    lying = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    with (tmp_path / "m.data").open("rb") as file:
        held = HeldFile(tmp_path / "m.data", file, own=False)
    weights = FrozenWeights(lambda _: held, list(lying.graph.initializer))
    if state == "replaced":
        (tmp_path / "other").write_bytes(bytes(held.size))
        (tmp_path / "other").replace(held.path)
    if state == "removed":
        held.path.unlink()
    given = Given()
    library.add_to(given.settings)
    slim = weights.given_to(given, lying, copied=True)
    assert len(stored) == 3
    assert sorted(given.copied) == ([] if state == "in place" else sorted(stored))
    session = ort.InferenceSession(slim.SerializeToString(), given.settings, providers=CPU.providers)
    x = np.random.default_rng(2).normal(size=(5, 256)).astype(np.float32)
    y, n = session.run(["y", "n"], {"x": x, "v": np.zeros((1, 320), np.float32)})
    np.testing.assert_allclose(y, x @ w.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(n, x @ floats, rtol=1e-4, atol=1e-4)


def test_a_block_that_is_no_multiple_of_16_is_left_to_others() -> None:
    model, _ = network(TensorProto.UINT4, 24, 64, 8, True, 2)
    assert "PackedMatMul" not in {node.op_type for node in for_machine(model, ORT_NATIVE).graph.node}


# of a square W, so that shapes say nothing; and whether the kernel takes them
READ = {
    "Gemm": ("y = Gemm <transB = 1> (x, w, c)", True),
    "Gemm of x turned": ("y = Gemm <transA = 1> (x, w)", False),
    "Gemm with a factor": ("y = Gemm <alpha = 2.0> (x, w)", False),
    "Gemm with a factor of what it adds": ("y = Gemm <beta = 2.0> (x, w, c)", False),
    "a transpose that turns nothing": ("t = Transpose <perm = [0, 1]> (w) y = MatMul (x, t)", False),
    "a vector": ("v = ReduceMax <keepdims = 0> (x, axis) y = MatMul (v, w)", False),
    "more axes than a kernel takes": ("v = Unsqueeze (x, axes) y = MatMul (v, w)", False),
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("fed", ["", "s"])
def test_what_reads_a_stored_weight(name: str, fed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, taken = READ[name]
    scales = "float[32, 2] s, " if fed else ""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]> g ({scales}float[32, 32] x, float[32] c) => (float[m, n] y)
        <int64[1] axis = {{0}}, int64[{native.MOST_AXES}] axes = {{{", ".join(map(str, range(native.MOST_AXES)))}}}>
        {{ w = DequantizeLinear <axis = 1, block_size = 16> (q, s) {nodes} }}""")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    rng = np.random.default_rng(0)
    arrays = {"q": rng.integers(0, 16, (32, 32)).astype(np.uint8), "s": rng.uniform(0.01, 0.1, (32, 2))}
    arrays |= {"x": rng.normal(size=(32, 32)), "c": rng.normal(size=32)}
    arrays = {n: a if n == "q" else a.astype(np.float32) for n, a in arrays.items()}
    given = {i.name for i in model.graph.input}
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items() if n not in given)
    model = onnx.shape_inference.infer_shapes(model)
    (expected,) = ort.InferenceSession(model.SerializeToString(), providers=CPU.providers).run(
        None, {n: arrays[n] for n in given}
    )
    lowered = for_machine(model, ORT_NATIVE)
    is_taken = taken and not fed
    assert ("PackedMatMul" in {node.op_type for node in lowered.graph.node}) == is_taken
    (found,) = computed(lowered, 1, **{n: arrays[n] for n in given if n in {i.name for i in lowered.graph.input}})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(native.Library, "has_fast_vectors", False)
    assert "PackedMatMul" not in {node.op_type for node in for_machine(model, ORT_NATIVE).graph.node}

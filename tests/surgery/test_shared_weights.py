"""Layers that read one weight: each is a layer of its own, whatever surgery does to it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import DataError, ModelError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 6)).astype(np.float32)
FORMS = {
    "MatMul": "g (float[n, 6] x) => (float[n, 6] y) { a = MatMul(x, w) r = Relu(a) y = MatMul(r, w) }",
    "transposed": "g (float[n, 6] x) => (float[n, 6] y) { t = Transpose(w) a = MatMul(x, t) r = Relu(a) "
    "y = MatMul(r, t) }",
    "both ways": "g (float[n, 6] x) => (float[n, 6] y) { a = MatMul(x, w) r = Relu(a) y = Gemm<transB = 1>(r, w) }",
    "tied": "g (float[n, 6] x) => (float[n, 6] y) { i = ArgMax<axis = 1, keepdims = 0>(x) e = Gather(w, i) "
    "r = Relu(e) t = Transpose(w) y = MatMul(r, t) }",
    "Conv": "g (float[n, 6] x) => (float[n, 6, 1] y) { two = Constant<value_ints = [2]>() u = Unsqueeze(x, two) "
    "three = Constant<value_ints = [0, 6, 1]>() v = Reshape(u, three) k = Unsqueeze(w, two) a = Conv(v, kernel) "
    "r = Relu(a) y = Conv(r, kernel) }",
    "dequantised once": "g (float[n, 6] x) => (float[n, 6] y) { d = DequantizeLinear(q, s) a = MatMul(x, d) "
    "r = Relu(a) y = MatMul(r, d) }",
    "dequantised twice": "g (float[n, 6] x) => (float[n, 6] y) { d = DequantizeLinear(q, s) a = MatMul(x, d) "
    "r = Relu(a) f = DequantizeLinear(q, s) y = MatMul(r, f) }",
}


def base(form: str) -> onnx.ModelProto:
    text = FORMS[form].replace("k = Unsqueeze(w, two) ", "")
    graph = onnx.parser.parse_graph(text)
    rng = np.random.default_rng(1)
    known = {
        "w": rng.normal(size=(6, 6)).astype(np.float32),
        "kernel": rng.normal(size=(6, 6, 1)).astype(np.float32),
        "q": rng.integers(-127, 128, (6, 6)).astype(np.int8),
        "s": np.array(0.01, np.float32),
    }
    read = {name for node in graph.node for name in node.input}
    graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in known.items() if n in read)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(model: onnx.ModelProto) -> np.ndarray:
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": X})[0])


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def trained(model: onnx.ModelProto, before: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Other numbers for all that was put in."""
    new = {n: a for n, a in weights(model).items() if n not in weights(before)}
    return {n: (a + 0.3 * RNG.normal(size=a.shape)).astype(a.dtype) for n, a in new.items()}


def with_numbers(model: onnx.ModelProto, numbers: dict[str, np.ndarray]) -> onnx.ModelProto:
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    for tensor in copy.graph.initializer:
        if tensor.name in numbers:
            tensor.CopyFrom(numpy_helper.from_array(numbers[tensor.name], tensor.name))
    return copy


def adapted(form: str, kind: str) -> tuple[onnx.ModelProto, onnx.ModelProto, dict[str, np.ndarray]]:
    if kind == "dora" and form == "tied":
        pytest.skip("an embedding has no DoRA")
    model = base(form)
    put = surgery.lora(model, "*", kind=kind, rank=2)
    return model, put, trained(put, model)


KINDS = ("lora", "rslora", "dora", "ia3", "bottleneck")


@pytest.mark.sweep(0.671)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_each_are_saved_and_loaded(form: str, kind: str, tmp_path: Path) -> None:
    model, put, numbers = adapted(form, kind)
    surgery.save_adapter(put, tmp_path, numbers)
    wanted = run(with_numbers(put, numbers))
    assert np.abs(wanted - run(model)).max() > 0.01
    np.testing.assert_allclose(run(surgery.load_adapter(model, tmp_path)), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS[:4])
def test_adapters_of_each_are_merged(form: str, kind: str) -> None:
    _, put, numbers = adapted(form, kind)
    wanted = run(with_numbers(put, numbers))
    np.testing.assert_allclose(run(surgery.merge_adapters(put, numbers)), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", ["dequantised once", "dequantised twice"])
@pytest.mark.parametrize("kind", KINDS[:4])
def test_adapters_of_each_are_merged_into_integers(form: str, kind: str) -> None:
    _, put, numbers = adapted(form, kind)
    errors: dict[str, float] = {}
    merged = surgery.merge_adapters(put, numbers, requantise=True, errors=errors)
    wanted = run(with_numbers(put, numbers))
    assert len(errors) == 2 and max(errors.values()) < 0.02
    assert {a.dtype for a in weights(merged).values() if a.ndim == 2} == {np.dtype(np.int8)}
    assert np.linalg.norm(run(merged) - wanted) < 0.05 * np.linalg.norm(wanted)


def test_a_module_that_is_called_again_has_the_adapter_of_peft(tmp_path: Path) -> None:
    """PEFT has one adapter for all calls of a module."""
    model = base("MatMul")
    once = onnx.ModelProto.FromString(model.SerializeToString())
    once.graph.node[2].input[1] = "other"
    once.graph.initializer.append(numpy_helper.from_array(weights(model)["w"], "other"))
    put = surgery.lora(once, "w", rank=2)
    numbers = trained(put, once)
    surgery.save_adapter(put, tmp_path, numbers)
    found = weights(surgery.load_adapter(model, tmp_path))
    np.testing.assert_array_equal(found["w.lora_A"], numbers["w.lora_A"])
    np.testing.assert_array_equal(found["w_1.lora_A"], numbers["w.lora_A"])


def test_a_weight_that_is_an_output_stays() -> None:
    model = base("MatMul")
    model.graph.node[2].input[1] = "other"
    model.graph.initializer.append(numpy_helper.from_array(weights(model)["w"], "other"))
    model.graph.output.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [6, 6]))
    put = surgery.lora(model, "w", rank=2)
    merged = surgery.merge_adapters(put, trained(put, model))
    session = ort.InferenceSession(merged.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(["w"], {"x": X})[0], weights(model)["w"])


# --- square matrices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".onnx", ".npz", None])
def test_own_weights_come_back(suffix: str | None, tmp_path: Path) -> None:
    """The layout of a square matrix is that of others in the file."""
    model = base("MatMul")
    model.graph.node.append(helper.make_node("MatMul", ["y", "top"], ["z"]))
    model.graph.output[0].name = "z"
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 2
    model.graph.initializer.append(numpy_helper.from_array(RNG.normal(size=(6, 2)).astype(np.float32), "top"))
    own, given = weights(model), tmp_path / f"own{suffix}"
    if suffix == ".onnx":
        onnx.save(model, given)
    elif suffix == ".npz":
        np.savez(given, **own)
    for back in (surgery.load_weights(model, given if suffix else own),):
        assert {n for n, a in weights(back).items() if (a != own[n]).any()} == set()
    of_torch: dict[str, Any] = {n: np.ascontiguousarray(a.T) for n, a in own.items()}
    assert {n for n, a in weights(surgery.load_weights(model, of_torch)).items() if (a != own[n]).any()} == set()


def test_square_matrices_alone_are_turned_as_is_said(tmp_path: Path) -> None:
    model = base("MatMul")
    own = weights(model)["w"]
    np.testing.assert_array_equal(weights(surgery.load_weights(model, {"w": own}, turned=False))["w"], own)
    np.testing.assert_array_equal(weights(surgery.load_weights(model, {"w": own}, turned=True))["w"], own.T)
    onnx.save(model, tmp_path / "own.onnx")
    np.testing.assert_array_equal(weights(surgery.load_weights(model, tmp_path / "own.onnx"))["w"], own)


def in_squares() -> onnx.ModelProto:
    """Only square matrices, each of which a MatMul reads."""
    header = '<ir_version: 10, opset_import: ["" : 21]> g (float[n, 4] x) => (float[n, 4] y)'
    model = onnx.parser.parse_model(f"{header} {{ h = MatMul(x, a) y = MatMul(h, b) }}")
    model.graph.initializer.extend(numpy_helper.from_array(RNG.normal(size=(4, 4)).astype(np.float32), n) for n in "ab")
    return model


FACTORS = {"MatMul": "MatMul({}, {})", "Gemm": "Gemm({}, {})", "turned Gemm": "Gemm<transB = 1>({}, {})"}


def several(sizes: list[int], kinds: list[str]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Matrices in a row, each read in its own way; and them as torch stores them."""
    lines, values = [], {}
    for i, kind in enumerate(kinds):
        lines.append(f"h{i + 1} = {FACTORS[kind].format(f'h{i}', f'w{i}')}")
        values[f"w{i}"] = RNG.normal(size=(sizes[i + 1], sizes[i])).astype(np.float32)
    header = '<ir_version: 10, opset_import: ["" : 21]>'
    last = len(kinds)
    model = onnx.parser.parse_model(
        f"{header} g (float[n, {sizes[0]}] h0) => (float[n, {sizes[-1]}] h{last}) {{ {' '.join(lines)} }}"
    )
    own = {n: v if k == "turned Gemm" else v.T for (n, v), k in zip(values.items(), kinds, strict=True)}
    model.graph.initializer.extend(numpy_helper.from_array(np.ascontiguousarray(v), n) for n, v in own.items())
    return model, values


@pytest.mark.parametrize("sizes", [[4, 4, 6], [6, 4, 4], [4, 4, 4]], ids=str)
@pytest.mark.parametrize("kinds", list(itertools.product(FACTORS, repeat=2)), ids=str)
def test_matrices_read_in_different_ways_are_right_or_refused(sizes: list[int], kinds: list[str]) -> None:
    model, of_torch = several(sizes, [*kinds])
    own, other = weights(model), onnx.ModelProto.FromString(model.SerializeToString())
    for tensor in other.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(np.zeros(tensor.dims, np.float32), tensor.name))
    for given in (own, of_torch):
        try:
            found = weights(surgery.load_weights(other, given))
        except DataError as error:
            assert "is square, and it is unknown" in str(error)
            found = weights(surgery.load_weights(other, given, turned=given is of_torch))
        assert all((found[name] == array).all() for name, array in own.items())
    trainer = gg.Trainer(gg.build(model, "mse"), device="cpu")
    found = weights(surgery.load_weights(other, trainer.state_dict()))  # whatever the others look like
    assert all((found[name] == array).all() for name, array in own.items())


@pytest.mark.parametrize("source", ["state_dict", "parameters", "checkpoint", "save_weights", "export"])
def test_what_gradgraph_wrote_is_never_turned(source: str, tmp_path: Path) -> None:
    trainer = gg.Trainer(gg.build(in_squares(), "mse", gg.optim.adam(0.1)), device="cpu")
    trainer.step({"x": np.ones((2, 4), np.float32), "target": np.zeros((2, 4), np.float32)})
    given: Any = trainer.state_dict() if source == "state_dict" else trainer.parameters
    if source == "checkpoint":
        trainer.save(given := tmp_path / "run.ckpt")
    elif source == "save_weights":
        trainer.save(tmp_path / "run.ckpt")
        gg.build(in_squares(), "mse", gg.optim.adam(0.1)).save(tmp_path / "step")
        gg.export.save_weights(tmp_path / "step", given := tmp_path / "w.safetensors", tmp_path / "run.ckpt")
    elif source == "export":
        trainer.export(given := tmp_path / "trained.onnx")
    loaded = weights(surgery.load_weights(in_squares(), given))
    for name, array in trainer.parameters.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_an_export_with_constants_of_formulas_loads_back(tmp_path: Path) -> None:
    """My opset and my operators, with new weights: what the export wrote into formulas is no weight."""
    text = """<ir_version: 4, opset_import: ["" : 9]> g (float[n, 4] x) => (float[n, 2] y)
              { h = Gemm<transB = 1>(x, w, b) c = Clip<min = -5.0, max = 5.0>(h) y = Selu(c) }"""
    model = onnx.parser.parse_model(text)
    arrays = {"w": RNG.normal(size=(2, 4)), "b": RNG.normal(size=2)}
    model.graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items())
    trainer = gg.Trainer(gg.build(model, "mse", gg.optim.sgd(0.1)), device="cpu")
    trainer.step({"x": np.ones((2, 4), np.float32), "target": np.ones((2, 2), np.float32)})
    trainer.export(tmp_path / "trained.onnx")
    back = surgery.load_weights(model, tmp_path / "trained.onnx")
    assert [n.op_type for n in back.graph.node] == ["Gemm", "Clip", "Selu"] and back.opset_import[0].version == 9
    np.testing.assert_array_equal(weights(back)["w"], trainer.parameters["w"])


def test_matrices_of_one_name_say_how_a_square_one_lies() -> None:
    """GPT-2 stores those of its Conv1D inputs first, and its head outputs first, in one file."""
    layers = {"0.c_proj.weight": (4, 4), "0.c_fc.weight": (4, 8), "1.c_proj.weight": (8, 4), "head.weight": (4, 6)}
    nodes, value = [], "x"
    for name in layers:
        nodes.append(helper.make_node("MatMul", [value, name], [f"{name}.y"]))
        value = f"{name}.y"
    own = {n: RNG.normal(size=s).astype(np.float32) for n, s in layers.items()}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, ["n", 4])],
        [helper.make_tensor_value_info(value, 1, ["n", 6])],
        [numpy_helper.from_array(a, n) for n, a in own.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    of_gpt = {n: np.ascontiguousarray(a.T) if n == "head.weight" else a for n, a in own.items()}
    of_linear = {n: np.ascontiguousarray(a.T) for n, a in own.items()}
    for given in (of_gpt, of_linear):
        for name, array in weights(surgery.load_weights(model, given)).items():
            np.testing.assert_array_equal(array, own[name])
    mixed = {n: a for n, a in of_gpt.items() if n != "1.c_proj.weight"}
    with pytest.raises(DataError, match=r"'0\.c_proj\.weight' is square"):
        surgery.load_weights(model, mixed, strict=False)


@pytest.mark.parametrize(
    ("head", "turns"), [("y = MatMul(e, h)", True), ("y = Gemm<transB = 1>(e, h)", False),
                        ("t = Transpose(h) y = MatMul(e, t)", False)]
)  # fmt: skip
def test_a_square_head_is_tied_as_its_layer_reads_it(head: str, turns: bool) -> None:
    text = "g (float[n, 6] x) => (float[n, 6] y) { i = ArgMax<axis = 1, keepdims = 0>(x) e = Gather(table, i) %s }"
    graph = onnx.parser.parse_graph(text % head)
    arrays = {n: RNG.normal(size=(6, 6)).astype(np.float32) for n in ("table", "h")}
    graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    table = arrays["table"]
    rows = table[X.argmax(1)]
    np.testing.assert_allclose(run(surgery.tie_weights(model, "h", "table")), rows @ table.T, rtol=1e-5, atol=1e-5)
    assert turns == any(n.op_type == "Transpose" for n in surgery.tie_weights(model, "h", "table").graph.node[:1])


def test_a_head_is_a_matrix() -> None:
    graph = onnx.parser.parse_graph("g (float[2, 3, 6] x) => (float[2, 3, 4] y) { y = MatMul(x, w) }")
    graph.initializer.append(numpy_helper.from_array(RNG.normal(size=(2, 6, 4)).astype(np.float32), "w"))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(ModelError, match=r"a weight of shape \[2, 6, 4\]; a head must have a matrix"):
        surgery.new_head(model, 5)


def test_a_bias_that_is_computed_is_merged_as_nodes() -> None:
    """PyTorch exports a Conv without a bias with zeros of as many samples."""
    graph = onnx.parser.parse_graph(
        "g (float[3, 6] x) => (float[3, 6] y) { o = Constant<value_floats = [0.5]>() n = CastLike(o, x) "
        "s = Constant<value_ints = [6]>() b = Expand(n, s) y = Gemm(x, w, b) }"
    )
    graph.initializer.append(numpy_helper.from_array(RNG.normal(size=(6, 6)).astype(np.float32), "w"))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    put = surgery.lora(model, "*", kind="ia3")
    numbers = trained(put, model)
    wanted = run(with_numbers(put, numbers))
    np.testing.assert_allclose(run(surgery.merge_adapters(put, numbers)), wanted, rtol=1e-5, atol=1e-5)

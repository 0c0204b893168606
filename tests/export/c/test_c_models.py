"""Models as C: single operators against onnxruntime, derivatives, refusals, and names from hostile files."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph.errors import ArgumentError, BuildError, OutputError, UnknownNameError
from gradgraph.export.c import operators
from gradgraph.export.c.c_reading import READERS
from gradgraph.export.c.composites import FORMULAS
from gradgraph.frontend import export, manual_seed, nn
from tests.kit.compiled_c import NEEDS_COMPILER, STRICT, Program, compiler
from tests.kit.running import run

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 3, 4)).astype(np.float32)
IMAGES = RNG.normal(size=(2, 4, 7, 6)).astype(np.float32)
LARGEST = 2**63 - 1
W33 = RNG.normal(size=(6, 2, 3, 3)).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def model_of(op_type: str, inputs: list[Any], outputs: int = 1, opset: int = 21, **attrs: Any) -> onnx.ModelProto:
    """Return a model of one node; the first input is the model's, others are constants, and None is absent."""
    first = inputs[0]
    names = ["x", *(f"c{i}" if value is not None else "" for i, value in enumerate(inputs[1:]))]
    node = helper.make_node(op_type, names, [f"y{i}" for i in range(outputs)], name="only", **attrs)
    x = helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(first.dtype), first.shape)
    known = [numpy_helper.from_array(v, n) for n, v in zip(names[1:], inputs[1:], strict=True) if v is not None]
    graph = helper.make_graph([node], "g", [x], [helper.make_empty_tensor_value_info(o) for o in node.output], known)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    **{name: (name, [X], {}) for name in (
        "Abs", "Atan", "Ceil", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu",
        "Mish", "Neg", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign",
        "Tan", "Tanh", "ThresholdedRelu", "Softmax", "LogSoftmax", "Celu",
        "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
        "ReduceLogSumExp",
    )},
    "Log": ("Log", [np.abs(X)], {}),
    "Softmax of channels": ("Softmax", [IMAGES], {"axis": 1}),
    "Softmax of float64": ("Softmax", [X.astype(np.float64)], {"axis": 1}),
    "LogSoftmax of channels": ("LogSoftmax", [IMAGES], {"axis": 1}),
    "Gelu tanh": ("Gelu", [X], {"approximate": "tanh"}),
    "PRelu": ("PRelu", [X, X[:1, :, :1]], {}),
    "Pow": ("Pow", [np.abs(X), X[0]], {}),
    "Max": ("Max", [X, X[0], X[:, :1]], {}),
    "Mean": ("Mean", [X, X[0], X[:, :1]], {}),
    "Clip": ("Clip", [X, np.array(-0.5, np.float32), np.array(0.25, np.float32)], {}),
    "Mod": ("Mod", [RNG.integers(-9, 9, (3, 4)), ints(4)], {}),
    "Div of integers": ("Div", [RNG.integers(-9, 9, (3, 4)), ints(4)], {}),
    "Mod of the largest": ("Mod", [np.array([7, -7, LARGEST, -LARGEST]), np.array([LARGEST])], {}),
    "Add beyond the largest": ("Add", [np.array([LARGEST, 1]), np.array([1, LARGEST])], {}),
    "Mul beyond the largest": ("Mul", [np.array([2**31 - 1, 3], np.int32), np.array([2**31 - 1, -7], np.int32)], {}),
    "Abs of the smallest": ("Abs", [np.array([-LARGEST - 1, -3])], {}),
    "Abs without a sign": ("Abs", [np.array([0, 2**32 - 1], np.uint32)], {}),
    "Sign without a sign": ("Sign", [np.array([0, 2**32 - 1], np.uint32)], {}),
    "Max of integers": ("Max", [RNG.integers(-9, 9, (3, 4)), ints(4)], {}),
    "Min of small integers": ("Min", [np.array([3, 250], np.uint8), np.array([7], np.uint8)], {}),
    "Clip without a sign": ("Clip", [np.array([0, 9], np.uint32), np.array(0, np.uint32), np.array(6, np.uint32)], {}),
    "Sign of what is no number": ("Sign", [np.array([np.nan, -0.5, 0, np.inf], np.float32)], {}),
    "ReduceLogSumExp of infinities": ("ReduceLogSumExp", [np.float32([[-np.inf] * 2, [np.inf, 1], [-np.inf, 2]]),
                                      ints(1)], {}),
    "Cast to integers": ("Cast", [X * 9], {"to": TensorProto.INT32}),
    "IsInf": ("IsInf", [np.array([1, -np.inf, np.inf, np.nan], np.float32)], {"detect_negative": 0}),
    "ReduceSum of axes": ("ReduceSum", [X, ints(0, 2)], {"keepdims": 0}),
    "ReduceMax of integers": ("ReduceMax", [RNG.integers(-9, 9, (3, 4)), ints(1)], {}),
    "ArgMax": ("ArgMax", [X], {"axis": 1}),
    "ArgMin of the last": ("ArgMin", [np.round(X)], {"axis": 2, "select_last_index": 1, "keepdims": 0}),
    "Transpose": ("Transpose", [X], {"perm": [2, 0, 1]}),
    "Slice": ("Slice", [X, ints(3, 5), ints(-9, 1), ints(1, 2), ints(-1, -2)], {}),
    "Concat": ("Concat", [X, X[:, :1]], {"axis": 1}),
    "Pad": ("Pad", [X, ints(0, 1, -1, 2, 0, 3), np.array(7, np.float32)], {}),
    "Tile": ("Tile", [X, ints(2, 1, 3)], {}),
    "Expand": ("Expand", [X[:, :1], ints(2, 5, 4)], {}),
    "Gather": ("Gather", [X, np.array([[0, -1], [2, 2]])], {"axis": 1}),
    "Gather one": ("Gather", [X, np.array(-1)], {"axis": 2}),
    "GatherElements": ("GatherElements", [X, RNG.integers(-3, 3, (2, 5, 4))], {"axis": 1}),
    "ScatterElements": ("ScatterElements", [X, RNG.integers(-3, 3, (2, 2, 4)), X[:, :2]],
                        {"axis": 1, "reduction": "add"}),
    "MatMul of columns": ("MatMul", [X, RNG.normal(size=(2, 4, 1)).astype(np.float32)], {}),
    "MatMul of rows and columns": ("MatMul", [X[:, :1], X[:, 1:2].transpose(0, 2, 1)], {}),
    "MatMul of one row": ("MatMul", [X[:, :1], RNG.normal(size=(4, 9)).astype(np.float32)], {}),
    "CumSum": ("CumSum", [X, np.array(1)], {"exclusive": 1, "reverse": 1}),
    "MatMul": ("MatMul", [X, RNG.normal(size=(4, 11)).astype(np.float32)], {}),
    "MatMul of batches": ("MatMul", [X[None], RNG.normal(size=(5, 1, 4, 2)).astype(np.float32)], {}),
    "MatMul of a vector": ("MatMul", [X, X[0, 0]], {}),
    "Gemm": ("Gemm", [X[0], X[1], X[0, :, :3], ], {"transA": 0, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    "Conv": ("Conv", [IMAGES, W33, W33[:, 0, 0, 0]], {"group": 2, "strides": [2, 1], "pads": [1, 0, 2, 1]}),
    "Conv with dilations": ("Conv", [IMAGES, W33], {"group": 2, "dilations": [2, 2], "pads": [1, 1, 1, 1]}),
    "Conv over one axis": ("Conv", [IMAGES[..., 0], W33[:4, :, 0]], {"group": 2, "pads": [1, 1]}),
    "ConvTranspose": ("ConvTranspose", [IMAGES, W33[:4]], {"group": 2, "strides": [2, 2], "output_padding": [1, 0]}),
    "MaxPool": ("MaxPool", [IMAGES], {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]}),
    "AveragePool": ("AveragePool", [IMAGES], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    "AveragePool of what is there": ("AveragePool", [IMAGES], {"kernel_shape": [2, 3], "pads": [0, 1, 1, 1]}),
    "LayerNormalization": ("LayerNormalization", [X, X[0, 0], X[1, 0]], {}),
    "InstanceNormalization": ("InstanceNormalization", [IMAGES, X[0, 0], X[1, 0]], {}),
    "BatchNormalization": ("BatchNormalization", [IMAGES, X[0, 0], X[1, 0], X[0, 1], np.abs(X[1, 1])], {}),
    "LSTM": ("LSTM", [X, X[:1, 0].repeat(8, 0)[None], W33[:4, 0].reshape(1, -1, 2)[:, :8],
                      X[0].ravel().repeat(2)[None, :16]],
             {"hidden_size": 2, "direction": "reverse"}),
    "GRU": ("GRU", [X, X.reshape(1, 6, 4), W33[:4, 0].reshape(1, -1, 2)[:, :6]], {"hidden_size": 2}),
    "GRU reset after": ("GRU", [X, X.reshape(1, 6, 4), W33[:4, 0].reshape(1, -1, 2)[:, :6], X.ravel()[None, :12]],
                        {"hidden_size": 2, "linear_before_reset": 1}),
    "RNN": ("RNN", [X, X[0, :2].reshape(1, 2, 4), X[0, 0].reshape(1, 2, 2)], {"hidden_size": 2}),
}  # fmt: skip


@NEEDS_COMPILER
@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("case", CASES)
def test_an_operator_computes_what_onnxruntime_does(case: str, tmp_path: Path) -> None:
    op_type, inputs, attrs = CASES[case]
    inputs = [np.ascontiguousarray(inputs[0]), *inputs[1:]]
    model = model_of(op_type, inputs, **attrs)
    (expected,) = run(model, {"x": inputs[0]}).values()
    gg.export.c(model, tmp_path / "c")
    found = np.zeros_like(expected)
    assert Program(tmp_path / "c", "model").call("run", inputs[0], found) == 0
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@NEEDS_COMPILER
def test_derivatives_of_a_dynamics_model(tmp_path: Path) -> None:
    """The Jacobian and the gradient of an MLP, as solvers call them."""
    manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    model = export(net, {"x": (5,)}, outputs=["next"])
    x = RNG.normal(size=5).astype(np.float32)
    for kind, made in {"jacobian": gg.jacobian(model, wrt=["x"]), "vjp": gg.vjp(model, wrt=["x"])}.items():
        feeds = {"x": x, **{i.name: np.ones(3, np.float32) for i in made.graph.input if i.name != "x"}}
        expected = run(made, feeds)
        folder = tmp_path / kind
        gg.export.c(made, folder, name="dynamics")
        results = [np.zeros_like(v) for v in expected.values()]
        ordered = [feeds[i.name] for i in made.graph.input]
        assert Program(folder, "dynamics").call("run", *ordered, *results) == 0
        for found, value in zip(results, expected.values(), strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)


def small_step(shape: Any = (2, 6)) -> gg.Step:
    manual_seed(0)
    return gg.build(export(nn.Linear(6, 4), {"x": shape}, outputs=["y"]), "cross_entropy", "sgd")


def test_a_mean_of_errors_needs_no_array_of_errors(tmp_path: Path) -> None:
    """A reduction to one number runs in the loop that computes its operand, even if that is a product."""
    w, t = (RNG.normal(size=(n, 40)).astype(np.float32) for n in (6, 5))
    node = helper.make_node
    nodes = [node("MatMul", ["x", "w"], ["y"]), node("Sub", ["y", "t"], ["e"]), node("Mul", ["e", "e"], ["s"]),
             node("ReduceMean", ["s"], ["m"], keepdims=0), node("ReduceMax", ["e"], ["top"], keepdims=0)]  # fmt: skip
    arguments = [helper.make_tensor_value_info(n, TensorProto.FLOAT, v) for n, v in (("x", (5, 6)), ("t", (5, 40)))]
    results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ()) for n in ("m", "top")]
    graph = helper.make_graph(nodes, "g", arguments, results, [numpy_helper.from_array(w, "w")])
    made = gg.export.c(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path)
    assert made.arena < t.nbytes / 10
    x = RNG.normal(size=(5, 6)).astype(np.float32)
    mean, top = np.zeros((), np.float32), np.zeros((), np.float32)
    assert Program(tmp_path, "model").call("run", x, t, mean, top) == 0
    np.testing.assert_allclose(mean, np.mean((x @ w - t) ** 2), rtol=1e-5)
    np.testing.assert_allclose(top, np.max(x @ w - t), rtol=1e-5)


def test_the_readme_counts_multiply_adds(tmp_path: Path) -> None:
    gg.export.c(small_step(), tmp_path / "linear")  # x [2, 6], 4 outputs; the loss multiplies 2 rows by their weights
    op_type, inputs, attrs = CASES["Conv"]
    gg.export.c(model_of(op_type, inputs, **attrs), tmp_path / "conv")  # y [2, 6, 4, 5], of 2 channels and 3x3 taps
    for folder, words in (
        ("linear", "98 in `trainer_step`, 50 in `trainer_evaluate`, 48 in `trainer_predict`"),
        ("conv", "4,320 in `model_run`"),
    ):
        assert f"padding included: {words}." in (tmp_path / folder / "README.md").read_text()


def test_open_sizes_are_refused_and_given(tmp_path: Path) -> None:
    step = small_step(("batch", 6))
    with pytest.raises(BuildError, match=r"'x' has dynamic sizes \('batch'\).*sizes="):
        gg.export.c(step, tmp_path / "c")
    with pytest.raises(UnknownNameError, match="no dynamic dimension 'bach'; did you mean 'batch'"):
        gg.export.c(step, tmp_path / "c", sizes={"bach": 1})
    gg.export.c(step, tmp_path / "c", sizes={"batch": 3})
    assert "#define TRAINER_X_SIZE 18 /* [3, 6] */" in (tmp_path / "c" / "trainer.h").read_text()


def test_too_little_memory_is_refused_with_the_largest_tensors(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"needs [\d,]+ bytes of RAM .*but ram is 100; .*'weight' \[4, 6\] with 96"):
        gg.export.c(small_step(), tmp_path / "c", ram=100)
    assert not (tmp_path / "c").exists()
    made = gg.export.c(small_step(), tmp_path / "c", ram=10_000)
    assert made.state == 112 and made.ram == made.state + made.arena


@pytest.mark.parametrize(
    ("op_type", "inputs", "attrs", "words"),
    [
        ("Resize", [IMAGES, None, np.array([1, 1, 2, 2], np.float32)], {}, "the operator is not supported"),
        ("Cast", [X], {"to": TensorProto.FLOAT16}, "it has the type float16"),
        ("MatMul", [X.astype(np.float64), X[0].T.astype(np.float64)], {}, "float32 only, not float64"),
        ("LSTM", [X, W33[:4, 0].reshape(1, 18, 2)[:, :8].repeat(2, 2), W33[:4, 0].reshape(1, -1, 2)[:, :8]],
         {"hidden_size": 2, "clip": 0.5}, "the operator is not supported"),
        ("Conv", [IMAGES[:, None], W33[None, :1, :1]], {}, "3 spatial axes"),
    ],
)  # fmt: skip
def test_what_has_no_c_code_is_refused_by_node(
    op_type: str, inputs: list[Any], attrs: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(BuildError, match=rf"node 'only' \({op_type}\) .*{words}"):
        gg.export.c(model_of(op_type, inputs, **attrs), tmp_path / "c")


def test_named_steps_and_names_of_programs_are_checked(tmp_path: Path) -> None:
    model = export(nn.Linear(6, 4), {"x": (2, 6)}, outputs=["y"])
    parts = {"a": gg.StepOptions("cross_entropy"), "b": gg.StepOptions("cross_entropy")}
    with pytest.raises(BuildError, match=r"several named steps \('a', 'b'\)"):
        gg.export.c(gg.build(model, steps=parts), tmp_path / "c")
    with pytest.raises(ArgumentError, match="C identifier"):
        gg.export.c(small_step(), tmp_path / "c", name="a b")
    gg.export.c(small_step(), tmp_path / "c")
    with pytest.raises(OutputError, match="not empty"):
        gg.export.c(small_step(), tmp_path / "c")


NAMES = [
    "default", "export", "friend", "nullptr", "char8_t", "static_assert", "linux", "INPUT", "B1", "EOF", "NULL", "NAN",
    "stdin", "errno", "arena_x", "fault_x", "return_0", "net_t", "net_init", "net_run", "x/y", "x.y", "X Y", "> y", "y",
    "é", "数", "_X", "__x", "a" * 300, "a" * 301,
]  # fmt: skip


@NEEDS_COMPILER
@pytest.mark.parametrize("language", ["c", "c++"])
def test_any_name_becomes_an_argument(language: str, tmp_path: Path) -> None:
    """Words of C and C++, macros, functions of the folder, and names that differ in other characters only."""
    nodes = [helper.make_node("Sum", NAMES, ["Y"])]
    arguments, results = (
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, (2,)) for n in names] for names in (NAMES, ["Y"])
    )
    graph = helper.make_graph(nodes, "g", arguments, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    gg.export.c(model, tmp_path / "c", name="net")
    if language == "c++":
        if shutil.which("g++") is None:
            pytest.skip("there is no C++ compiler")
        caller = tmp_path / "caller.cpp"
        caller.write_text('#include <cerrno>\n#include <cstdio>\n#include "net.h"\n')
        subprocess.run(["g++", "-Werror", f"-I{tmp_path / 'c'}", "-fsyntax-only", caller], check=True)
        return
    compiler(*STRICT, "-std=gnu99", tmp_path / "c" / "net.c", tmp_path / "c" / "example.c", "-o", tmp_path / "p", "-lm")
    found = np.zeros(2, np.float32)
    values = [np.array([2.0**-i, i], np.float32) for i in range(len(NAMES))]
    assert Program(tmp_path / "c", "net").call("run", *values, found) == 0
    np.testing.assert_allclose(found, np.sum(values, 0), rtol=1e-6)


def test_sizes_of_different_tensors_have_different_names(tmp_path: Path) -> None:
    """Those of trainer_step's input and of trainer_predict's result, whose names differ in the last character."""
    names = ["x" * 50 + c for c in "ab"]
    model = export(nn.Linear(6, 4), {names[0]: (2, 6)}, outputs=names[1:])
    gg.export.c(gg.build(model, "cross_entropy", "sgd"), tmp_path / "c")
    macros = re.findall(r"#define (TRAINER_X+(?:_2)?_SIZE) (\d+)", (tmp_path / "c" / "trainer.h").read_text())
    assert sorted(int(size) for size in dict(macros).values()) == [8, 12]


@pytest.mark.parametrize("name", ["float", "example", "math", "String", "int32", "uint8", "size", "x.y", "a" * 32])
def test_prefixes_that_c_uses_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="C identifier of at most 31 characters that C does not use itself"):
        gg.export.c(small_step(), tmp_path / "c", name=name)


@pytest.mark.parametrize("op_type", ["GatherElements", "ScatterElements"])
def test_indices_of_no_elements_are_refused(op_type: str, tmp_path: Path) -> None:
    rest = [X[0]] if op_type == "ScatterElements" else []
    model = model_of(op_type, [np.zeros((0, 4), np.float32), np.zeros((3, 4), np.int64), *rest])
    with pytest.raises(BuildError, match="its indices are for an axis of size 0"):
        gg.export.c(model, tmp_path / "c")


@NEEDS_COMPILER
def test_hostile_names_never_reach_the_source(tmp_path: Path) -> None:
    evil = '*/ int x; system("rm") /*'
    model = onnx.ModelProto()
    model.CopyFrom(model_of("Relu", [X]))
    names = {"x": f"int {evil}\n#error", "y0": f"{evil}\\\n??/"}
    node = model.graph.node[0]
    node.name, node.input[0], node.output[0] = evil, names["x"], names["y0"]
    model.graph.input[0].name, model.graph.output[0].name = names["x"], names["y0"]
    del model.graph.value_info[:]
    gg.export.c(model, tmp_path / "c")
    for file in (tmp_path / "c").iterdir():
        assert "system(" not in file.read_text() or file.suffix == ".json"
    found = np.zeros_like(X)
    assert Program(tmp_path / "c", "model").call("run", X, found) == 0
    assert np.array_equal(found, np.maximum(X, 0))


def test_the_page_lists_every_operator() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "c-interface.md").read_text()
    names = {*operators.ELEMENTWISE, *operators.REDUCTIONS, *READERS, *FORMULAS} - {"gradgraph:After"}
    assert [n for n in sorted(names) if f"`{n.removeprefix('gradgraph:')}`" not in page] == []

"""``check_gradients`` and ``gradgraph check``: right gradients pass, wrong ones are named."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.helper import (
    make_graph,
    make_model,
    make_node,
    make_opsetid,
    make_tensor_value_info,
    np_dtype_to_tensor_dtype,
)

from gradgraph.backends.capability import Row, Table
from gradgraph.errors import DataError, ModelError
from gradgraph.rules import registry
from gradgraph.verify import check_gradients as module
from gradgraph.verify.check_gradients import check_gradients
from tests.kit.command_line import Cli, mlp

FLOAT, INT = np.float32, np.int64
Specs = Mapping[str, tuple[Any, Sequence[int | str | None]]]


def model_of(
    nodes: Sequence[onnx.NodeProto], inputs: Specs, weights: Mapping[str, np.ndarray] | None = None
) -> onnx.ModelProto:
    """A model with the output ``y`` of unknown shape."""
    infos = [make_tensor_value_info(n, np_dtype_to_tensor_dtype(np.dtype(t)), s) for n, (t, s) in inputs.items()]
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in (weights or {}).items()]
    graph = make_graph(list(nodes), "g", infos, [make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)], tensors)
    return make_model(graph, opset_imports=[make_opsetid("", 21)], ir_version=10)


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def convolution() -> onnx.ModelProto:
    """Its open height and width must be at least 7."""
    nodes = [make_node("Conv", ["x", "w"], ["c"], kernel_shape=[7, 7]), make_node("Relu", ["c"], ["y"])]
    return model_of(nodes, {"x": (FLOAT, ["N", 2, "H", "W"])}, {"w": weight(3, 2, 7, 7)})


def embedding() -> onnx.ModelProto:
    """Its indices must be below 3; they pass an Unsqueeze on their way."""
    nodes = [
        make_node("Unsqueeze", ["ids", "one"], ["column"]),
        make_node("Gather", ["table", "column"], ["e"]),
        make_node("Tanh", ["e"], ["y"]),
    ]
    return model_of(nodes, {"ids": (INT, ["N", "T"])}, {"table": weight(3, 4), "one": np.array([1])})


def masked() -> onnx.ModelProto:
    """Where the mask holds no one, the result is NaN."""
    nodes = [
        make_node("Cast", ["mask"], ["m"], to=onnx.TensorProto.FLOAT),
        make_node("Log", ["m"], ["bias"]),
        make_node("Add", ["x", "bias"], ["s"]),
        make_node("Softmax", ["s"], ["y"]),
    ]
    return model_of(nodes, {"x": (FLOAT, ["N", "T"]), "mask": (INT, ["N", "T"])})


def logarithm() -> onnx.ModelProto:
    """Finite for positive numbers only."""
    nodes = [make_node("Log", ["x"], ["l"]), make_node("Mul", ["l", "w"], ["y"])]
    return model_of(nodes, {"x": (FLOAT, [4])}, {"w": weight(4)})


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (mlp(), ["x", "first.weight", "first.bias", "last.weight", "last.bias"]),
        (convolution(), ["x", "w"]),
        (embedding(), ["table"]),
        (masked(), ["x"]),
        (logarithm(), ["x", "w"]),
    ],
    ids=["mlp", "convolution", "embedding", "masked", "logarithm"],
)
def test_right_gradients_pass(model: onnx.ModelProto, names: list[str]) -> None:
    report = check_gradients(model)
    assert report.precision == "float64"
    assert [t.name for t in report.tensors] == names
    assert all(t.resolved and t.error < 1e-6 for t in report.tensors)
    assert report.ok


def scaled(rule: registry.Rule, factor: float) -> registry.Rule:
    """The rule with every gradient ``factor`` times too large."""

    def emit(op: Any, *arguments: Any, **attributes: Any) -> list[Any]:
        return [None if g is None else g * factor for g in rule.emit(op, *arguments, **attributes)]

    return dataclasses.replace(rule, emit=emit)


def without(rule: registry.Rule, index: int) -> registry.Rule:
    """The rule with no gradient for one input."""

    def emit(op: Any, *arguments: Any, **attributes: Any) -> list[Any]:
        return [None if i == index else g for i, g in enumerate(rule.emit(op, *arguments, **attributes))]

    return dataclasses.replace(rule, emit=emit)


def broken(monkeypatch: pytest.MonkeyPatch, op_type: str, change: Any) -> None:
    monkeypatch.setitem(registry.RULES, ("", op_type), change(registry.RULES["", op_type]))


@pytest.mark.parametrize(
    ("op_type", "change", "wrong"),
    [
        ("Gemm", lambda rule: scaled(rule, 1.001), {"x", "first.weight", "first.bias", "last.weight", "last.bias"}),
        ("Relu", lambda rule: scaled(rule, 0.999), {"x", "first.weight", "first.bias"}),
        ("Gemm", lambda rule: without(rule, 2), {"first.bias", "last.bias"}),
        ("Relu", lambda rule: without(rule, 0), {"x", "first.weight", "first.bias"}),
    ],
)
def test_wrong_gradients_are_named(monkeypatch: pytest.MonkeyPatch, op_type: str, change: Any, wrong: set[str]) -> None:
    broken(monkeypatch, op_type, change)
    report = check_gradients(mlp())
    assert not report.ok
    assert {t.name for t in report.tensors if not t.ok} == wrong


def test_float32_where_the_reference_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SINGLE_INSIDE", frozenset({"Conv"}))
    report = check_gradients(convolution())
    assert (report.precision, report.tolerance) == ("float32", 2e-2)
    assert "Conv" in report.reason
    assert report.ok
    broken(monkeypatch, "Conv", lambda rule: scaled(rule, 1.1))
    assert {t.name for t in check_gradients(convolution()).tensors if not t.ok} == {"x", "w"}


def test_gradients_smaller_than_rounding_are_not_called_wrong() -> None:
    """Softmax of equal logits: the gradient is zero but for rounding errors of large numbers."""
    nodes = [
        make_node("Mul", ["x", "big"], ["b"]),
        make_node("ReduceSum", ["b"], ["s"]),
        make_node("Expand", ["s", "shape"], ["e"]),
        make_node("Softmax", ["e"], ["y"]),
    ]
    weights = {"big": np.full(3, 1e9, np.float32), "shape": np.array([1, 1000])}
    report = check_gradients(model_of(nodes, {"x": (FLOAT, [3])}, weights))
    assert report.ok
    assert not report.tensors[0].resolved


@pytest.mark.parametrize("offset", [0, 1e4, 1e6])
def test_outputs_may_be_coarser_than_an_input(monkeypatch: pytest.MonkeyPatch, offset: float) -> None:
    """As where numbers of a table, in float64, are scaled and cast: differences are rounded as the outputs are."""
    monkeypatch.setattr(module, "SINGLE_INSIDE", frozenset({"Cast"}))
    nodes = [
        make_node("Mul", ["x", "scale"], ["s"]),
        make_node("Cast", ["s"], ["c"], to=onnx.TensorProto.FLOAT),
        make_node("Sin", ["c"], ["t"]),
        make_node("Add", ["t", "offset"], ["y"]),
    ]
    weights = {"scale": np.array(1 / 30), "offset": np.array(offset, FLOAT)}
    model = model_of(nodes, {"x": (np.float64, [1])}, weights)
    report = check_gradients(model, wrt=["x"])
    assert report.precision == "float32" and report.ok
    broken(monkeypatch, "Sin", lambda rule: scaled(rule, 1.5))
    assert check_gradients(model, wrt=["x"]).ok == (offset > 0)  # where too little is left to see


def test_a_wrong_shape_of_an_output_misleads_nobody() -> None:
    model = mlp()
    del model.graph.output[0].type.tensor_type.shape.dim[1]
    report = check_gradients(model)
    assert report.ok
    assert "last.bias" in [t.name for t in report.tensors]


def test_random_models_are_refused() -> None:
    nodes = [make_node("RandomNormalLike", ["x"], ["r"]), make_node("Mul", ["x", "r"], ["y"])]
    with pytest.raises(DataError, match="draws random numbers"):
        check_gradients(model_of(nodes, {"x": (FLOAT, [3])}))


def test_models_without_a_finite_value_are_refused() -> None:
    nodes = [make_node("Neg", ["x"], ["n"]), make_node("Mul", ["n", "n"], ["p"]), make_node("Mul", ["p", "inf"], ["y"])]
    with pytest.raises(DataError, match="empty or not finite"):
        check_gradients(model_of(nodes, {"x": (FLOAT, [3])}, {"inf": np.array([np.inf], np.float32)}))


def test_given_inputs_are_used() -> None:
    nodes = [make_node("Mul", ["x", "x"], ["y"])]
    (tensor,) = check_gradients(model_of(nodes, {"x": (FLOAT, ["N"])}), {"x": [1.0, 2.0, 3.0], "target": [0]}).tensors
    assert tensor.shape == (3,)


def test_command_prints_a_table_and_counts(cli: Cli) -> None:
    ran = cli("check", "model.onnx")
    assert ran.code == 0
    assert ran.out.splitlines()[0].split() == ["tensor", "shape", "gradient", "difference", "error", "ok"]
    assert len(ran.out.splitlines()) == 6
    assert "all gradients agree" in ran.err


def test_command_exits_1_on_a_finding(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "Relu", lambda rule: scaled(rule, 1.1))
    ran = cli("check", "model.onnx", "--json")
    assert ran.code == 1
    report = json.loads(ran.out)
    assert not report["ok"]
    assert [t["ok"] for t in report["tensors"]] == [False, False, False, True, True]
    ran = cli("check", "model.onnx", "--wrt", "first.*")
    assert ran.code == 1
    assert "WRONG" in ran.out
    assert ran.err.splitlines()[-1].startswith("error: 2 of 2 tensors")


def test_command_checks_at_given_data(cli: Cli, folder: Path) -> None:
    ran = cli("check", "model.onnx", "--data", "train.npz", "--rows", "7", "--wrt", "x", "--json")
    assert json.loads(ran.out)["tensors"][0]["shape"] == [7, 4]


def test_command_checks_against_the_table_of_a_runtime(cli: Cli) -> None:
    ran = cli("check", "model.onnx", "--backend", "coreml", "--json")
    report = json.loads(ran.out)
    assert ran.code == 0
    assert (report["ok"], report["tested"], report["runtime"]) == (True, False, "Core ML")
    assert set(report["counts"]) <= {"falls back"}
    ran = cli("check", "model.onnx", "--backend", "coreml", "--wrt", "x")
    assert ran.code == 2
    assert "have no effect with --backend" in ran.err
    assert cli("check", "model.onnx", "--backend", "auto").code == 2


def test_command_exits_1_where_a_runtime_would_be_wrong(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Table("Toy", "1.0", "a test", tested=True, complete=False, falls_back=False, functions=True, opsets=(7, 26),
                ir_versions=(3, 13), rows={"Gemm": Row.read({"wrong": ["*: it adds no bias"]})})  # fmt: skip
    monkeypatch.setattr("gradgraph.backends.capability.table_of", lambda name: toy)
    ran = cli("check", "model.onnx", "--backend", "coreml")
    assert ran.code == 1
    assert ran.out.splitlines()[0].split() == ["file", "node", "verdict", "reason"]
    assert "it adds no bias" in ran.out
    assert ran.err.splitlines()[-1].startswith("error: Toy 1.0, ")
    assert "computed incorrectly" in ran.err


# --- kinks ------------------------------------------------------------------------------------------------

AT = np.array([0.7, -0.4, 1.3, -1.1], np.float32)
BENT: dict[str, tuple[list[onnx.NodeProto], np.ndarray]] = {  # what makes y of b, and b, where it bends
    "zeros": ([make_node("Relu", ["b"], ["y"])], np.zeros(4, np.float32)),
    "one zero": ([make_node("Relu", ["b"], ["y"])], AT * [1, 0, 1, 1]),
    "a zero nearby": ([make_node("Abs", ["b"], ["y"])], AT * [1, 1e-6, 1, 1e-6]),
    "ties": ([make_node("ReduceMax", ["b"], ["m"]), make_node("Mul", ["m", "b"], ["y"])], np.ones(4, np.float32)),
    "a bound": ([make_node("Clip", ["b", "low"], ["y"])], AT.clip(-0.4)),
    "a slope that turns fast": ([make_node("Mul", ["b", "fast"], ["f"]), make_node("Sin", ["f"], ["y"])], AT),
}


def bent(name: str) -> onnx.ModelProto:
    nodes, b = BENT[name]
    return model_of(nodes, {}, {"b": b.astype(np.float32), "low": np.float32(-0.4), "fast": np.float32(3e5)})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", BENT)
def test_a_kink_is_no_fault(name: str, seed: int) -> None:
    (found,) = check_gradients(bent(name), wrt="b", seed=seed).tensors
    assert found.ok
    assert found.resolved
    assert found.kink == (name in ("zeros", "one zero", "ties", "a bound"))


@pytest.mark.sweep(0.53)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [1.001, 0.999, 1.01, 0.5, -1.0])
@pytest.mark.parametrize("name", BENT)
def test_a_fault_at_a_kink_is_found(monkeypatch: pytest.MonkeyPatch, name: str, factor: float, seed: int) -> None:
    broken(monkeypatch, BENT[name][0][-1].op_type, lambda rule: scaled(rule, factor))
    assert not check_gradients(bent(name), wrt="b", seed=seed).ok


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("width", "beside"), [(w, b) for w in (1e-7, 1e-5, 1e-3, 1e-1) for b in (0.5, 0.0)])
def test_a_fault_that_lies_near_a_kink_is_found(
    monkeypatch: pytest.MonkeyPatch, width: float, beside: float, seed: int
) -> None:
    def late(op: Any, dy: Any, y: Any, x: Any) -> list[Any]:
        return [op.Where(op.Greater(x, width), dy, 0.0)]

    broken(monkeypatch, "Relu", lambda rule: dataclasses.replace(rule, emit=late))
    b = np.array([width / 2, beside, 0.9, -0.6], np.float32)
    assert not check_gradients(model_of([make_node("Relu", ["b"], ["y"])], {}, {"b": b}), wrt="b", seed=seed).ok


def test_command_says_where_it_looked_beside_a_kink(cli: Cli, folder: Path) -> None:
    onnx.save(bent("one zero"), folder / "bent.onnx")
    assert "ok (next to a kink)" in cli("check", "bent.onnx", "--wrt", "b").out


@pytest.mark.parametrize("height", [1e-3, 1e-8, 1e-9])
@pytest.mark.parametrize("op_type", ["Log", "Sqrt", "Reciprocal"])
def test_steep_ends_of_a_domain_are_no_faults(op_type: str, height: float) -> None:
    """Mel filters of others hold zeros: steps that are short for other weights leave the domain of a logarithm."""
    weights = {"w": np.array([[1.0, height], [0.0, 0.0], [0.0, 0.0]], np.float32), "b": weight(1, 2) ** 2}
    nodes = [
        make_node("MatMul", ["x", "w"], ["m"]),
        make_node(op_type, ["m"], ["l"]),
        make_node("Mul", ["l", "b"], ["y"]),
    ]
    report = check_gradients(
        model_of(nodes, {"x": (FLOAT, [4, 3])}, weights), {"x": np.abs(weight(4, 3)) + 1}, wrt=["w"]
    )
    assert report.ok, report


def test_command_checks_at_the_sizes_that_are_given(cli: Cli, folder: Path) -> None:
    onnx.save(convolution(), folder / "open.onnx")
    ran = cli("check", "open.onnx", "--size", "H=9", "--size", "N=3", "--wrt", "x", "--json")
    assert json.loads(ran.out)["tensors"][0]["shape"][:3] == [3, 2, 9]
    ran = cli("check", "open.onnx", "--size", "K=9")
    assert ran.code == 1
    assert "no input has a dimension called 'K'" in ran.err


def hostile(name: str) -> onnx.ModelProto:
    """One that repeats a number more often than memory holds, and one that never ends."""
    text = {
        "Expand": "<int64[2] s = {60000,60000}> { e = Expand(x, s) q = Exp(e) y = ReduceSum<keepdims=0>(q) }",
        "Loop": "<int64 n = {1000000000000}, bool c = {1}> { y = Loop(n, c, x) <body = b (int64 i, bool ci, float[1] a)"
        " => (bool co, float[1] o) { co = Identity(ci) o = Mul(a, a) }> }",
    }[name]
    y = "float y" if name == "Expand" else "float[1] y"
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g (float[1] x) => ({y}) {text}')


@pytest.mark.sweep(0)
@pytest.mark.parametrize("name", ["Expand", "Loop"])
def test_command_ends_what_takes_too_long_or_too_much(name: str, tmp_path: Path) -> None:
    onnx.save(hostile(name), tmp_path / "m.onnx")
    command = [sys.executable, "-m", "gradgraph", "check", str(tmp_path / "m.onnx"), "--seconds", "10"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: ") and ran.stderr.count("\n") == 1
    assert "seconds" in ran.stderr or "memory" in ran.stderr


def test_sizes_at_which_the_gradient_runs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes any size may have a gradient that does not."""
    real = module._Gradients.at

    def small(self: Any, feeds: Any, values: Any) -> Any:
        if feeds["x"].shape[-1] < 16:
            raise ModelError("too small")
        return real(self, feeds, values)

    monkeypatch.setattr(module._Gradients, "at", small)
    report = check_gradients(model_of([make_node("Exp", ["x"], ["y"])], {"x": (FLOAT, ["N", "M"])}))
    assert report.ok
    assert report.tensors[0].shape == (2, 16)

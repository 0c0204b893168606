"""Jacobians, Hessians and gradients of each sample: names, shapes, modes, samples that mix, command line, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph.cli.app import run as command
from gradgraph.errors import ArgumentError, DifferentiationError, UnknownNameError
from gradgraph.frontend import Input, Module, export, nn
from gradgraph.frontend import functional as F
from tests.kit.running import run

RNG = np.random.default_rng(0)
node = helper.make_node
W = RNG.normal(size=(4, 3)).astype(np.float32)


def tensor(*shape: int) -> np.ndarray:
    return np.asarray(RNG.normal(size=shape), np.float32)


def model_of(nodes: list[onnx.NodeProto], inputs: dict[str, list[Any]], outputs: dict[str, list[Any] | None],
             weights: dict[str, np.ndarray] | None = None) -> onnx.ModelProto:  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, v) for k, v in inputs.items()],
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, v) for k, v in outputs.items()],
        [numpy_helper.from_array(v, k) for k, v in (weights or {"w": W}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def squares() -> onnx.ModelProto:
    """An output y = (x·w)² with an open batch, and loss = Σ y."""
    nodes = [
        node("MatMul", ["x", "w"], ["z"]),
        node("Mul", ["z", "z"], ["y"]),
        node("ReduceSum", ["y"], ["loss"], keepdims=0),
    ]
    return model_of(nodes, {"x": ["n", 4]}, {"y": ["n", 3], "loss": []})


def dims(model: onnx.ModelProto) -> dict[str, list[Any]]:
    return {o.name: [d.dim_value or d.dim_param for d in o.type.tensor_type.shape.dim] for o in model.graph.output}


# --- names, shapes, numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "reverse", "forward"])
@pytest.mark.parametrize("backend", ["portable", "ort-cpu"])
def test_jacobian_of_every_size(mode: Any, backend: str) -> None:
    m = gg.jacobian(squares(), wrt=["x", "w"], mode=mode, backend=backend)
    onnx.checker.check_model(m, full_check=True)
    assert [i.name for i in m.graph.input] == ["x"]
    assert dims(m)["x.jacobian"] == ["n", 3, "n", 4]
    assert dims(m)["w.jacobian"] == ["n", 3, 4, 3]
    for n in (1, 5):
        x = tensor(n, 4)
        found = run(m, {"x": x})
        z, eye = x @ W, np.eye
        np.testing.assert_allclose(found["y"], z**2, rtol=1e-5)
        by_x = 2 * np.einsum("no,io,nm->nomi", z, W, eye(n))
        by_w = 2 * np.einsum("no,ni,op->noip", z, x, eye(3))
        np.testing.assert_allclose(found["x.jacobian"], by_x, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["w.jacobian"], by_w, rtol=1e-5, atol=1e-6)
        own = run(gg.jacobian(squares(), wrt="x", mode=mode, backend=backend, per_sample=True), {"x": x})
        np.testing.assert_allclose(own["x.jacobian"], by_x[range(n), :, range(n)], rtol=1e-5, atol=1e-6)


def test_what_does_not_depend_on_a_unit_vector_runs_once() -> None:
    """Products of the forward pass stay outside of the Scan."""
    for mode in ("reverse", "forward"):
        m = gg.jacobian(squares(), wrt="x", mode=mode)
        (scan,) = [n for n in m.graph.node if n.op_type == "Scan"]
        inside = [n.op_type for n in scan.attribute[0].g.node]
        assert sum(kind in ("MatMul", "Gemm") for kind in inside) == 1
        assert sum(n.op_type in ("MatMul", "Gemm") for n in m.graph.node) == 1


def test_the_cheaper_mode_is_chosen() -> None:
    """Two inputs and many outputs: forward mode has rows of the output's size."""
    wide = model_of([node("Mul", ["a", "w"], ["y"])], {"a": [1]}, {"y": [12]}, {"w": tensor(12)})
    for name, rows in (("a", 1), ("w", 12)):
        m = gg.jacobian(wide, wrt=name)
        (scan,) = [n for n in m.graph.node if n.op_type == "Scan"]
        places = next(t for t in m.graph.initializer if t.name == scan.input[-1])
        assert list(places.dims) == [rows]


def test_blocks_of_a_hessian() -> None:
    m = gg.hessian(squares(), output="loss", wrt=["x", "w"])
    onnx.checker.check_model(m, full_check=True)
    names = ["y", "loss", "x.hessian", "x.w.hessian", "w.x.hessian", "w.hessian"]
    assert [o.name for o in m.graph.output] == names
    assert dims(m)["x.w.hessian"] == ["n", 4, 4, 3]
    x = tensor(5, 4)
    found = run(m, {"x": x})
    np.testing.assert_allclose(found["x.hessian"], 2 * np.einsum("io,jo,nm->nimj", W, W, np.eye(5)), rtol=1e-5)
    np.testing.assert_allclose(found["x.w.hessian"], found["w.x.hessian"].transpose(2, 3, 0, 1), rtol=1e-5, atol=1e-6)


def test_results_are_models_that_can_be_transformed_again() -> None:
    """The gradient of a sum over a Jacobian of squares; loops that are differentiated, too."""
    m = gg.jacobian(squares(), wrt="x")
    seconds = gg.vjp(m, outputs="x.jacobian", wrt="x")
    x = tensor(2, 4)
    found = run(seconds, {"x": x, "x.jacobian.cotangent": np.ones((2, 3, 2, 4), np.float32)})["x.grad"]
    np.testing.assert_allclose(found, np.tile(2 * (W.sum(0) * W).sum(1), (2, 1)), rtol=1e-4)
    again = gg.jacobian(m, output="y", wrt="x")
    assert [o.name for o in again.graph.output][-2:] == ["x.jacobian", "x.jacobian_1"]


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_through_a_loop(mode: Any) -> None:
    """Numbers doubled three times in a Loop, which also is an output of its own."""
    float_info = helper.make_tensor_value_info
    body = helper.make_graph(
        [node("Add", ["s", "s"], ["s2"]), node("Identity", ["go"], ["on"])],
        "body",
        [float_info("i", TensorProto.INT64, []), float_info("go", TensorProto.BOOL, []),
         float_info("s", TensorProto.FLOAT, [2])],
        [float_info("on", TensorProto.BOOL, []), float_info("s2", TensorProto.FLOAT, [2])],
    )  # fmt: skip
    nodes = [node("Loop", ["three", "", "x"], ["twice"], body=body), node("Mul", ["twice", "x"], ["y"])]
    weights = {"three": np.array(3, np.int64)}
    m = gg.jacobian(model_of(nodes, {"x": [2]}, {"y": [2], "twice": [2]}, weights), wrt="x", mode=mode)
    x = tensor(2)
    found = run(m, {"x": x})
    np.testing.assert_allclose(found["twice"], 8 * x, rtol=1e-6)
    np.testing.assert_allclose(found["x.jacobian"], np.diag(16 * x), rtol=1e-6)


def test_names_without_influence() -> None:
    model = squares()
    model.graph.input.append(helper.make_tensor_value_info("u", TensorProto.FLOAT, [2]))
    feeds = {"x": tensor(2, 4), "u": tensor(2)}
    for transform, output, shape in ((gg.jacobian, "y", (2, 3, 2)), (gg.hessian, "loss", (2, 2))):
        with pytest.raises(DifferentiationError, match="does not depend on 'u'"):
            transform(model, output=output, wrt=["x", "u"])
        found = run(transform(model, output=output, wrt=["x", "u"], allow_unused=True), feeds)
        np.testing.assert_array_equal(found["u.jacobian" if output == "y" else "u.hessian"], np.zeros(shape))


# --- samples ---------------------------------------------------------------------------------------------


class Net(Module):
    """A classifier with its loss; ``mix`` is what happens to features."""

    def __init__(self, mix: Any = lambda h: h, reduction: str = "mean") -> None:
        super().__init__()
        self.first, self.last, self.mix, self.reduction = nn.Linear(4, 6), nn.Linear(6, 3), mix, reduction

    def forward(self, x: Any, target: Any) -> Any:
        return F.cross_entropy(self.last(self.mix(F.tanh(self.first(x)))), target, reduction=self.reduction)


def exported(net: Module) -> onnx.ModelProto:
    gg.frontend.manual_seed(0)
    return export(net, {"x": ("n", 4), "target": Input(("n",), "int64")})


APART = {
    "nothing": lambda h: h,
    "softmax": lambda h: F.softmax(h, -1),
    "transposed twice": lambda h: h.transpose(0, 1).transpose(0, 1),
    "reshaped": lambda h: h.reshape(-1, 2, 3).transpose(1, 2).reshape(-1, 6),
    "merged": lambda h: F.layer_norm(h.reshape(-1, 2), (2,)).reshape(-1, 6),
    "product": lambda h: (h.reshape(-1, 2, 3).transpose(1, 2) @ h.reshape(-1, 2, 3)).reshape(-1, 9)[:, :6],
    "by its own size": lambda h: h - h.mean(1, keepdim=True),
}
MIXED = {
    "mean of the batch": lambda h: h - h.mean(0, keepdim=True),
    "softmax over samples": lambda h: F.softmax(h, 0),
    "product of samples": lambda h: (h @ h.transpose(0, 1)) @ h,
    "turned": lambda h: h.transpose(0, 1).reshape(-1, 6),
    "sum over samples": lambda h: h + F.cumsum(h, 0),
    "flipped": lambda h: h.flip(0),
}


@pytest.mark.sweep(0.36)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", APART)
def test_gradients_of_samples_add_up(kind: str, reduction: str) -> None:
    model = exported(Net(APART[kind], reduction))
    feeds = {"x": tensor(5, 4), "target": np.arange(5) % 3}
    m = gg.per_sample_gradients(model, wrt=["*weight", "x"])
    onnx.checker.check_model(m, full_check=True)
    found, whole = run(m, feeds), run(gg.value_and_grad(model, wrt=["*weight", "x"]), feeds)
    of_batch = np.mean if reduction == "mean" else np.sum
    first = model.graph.output[0].name
    np.testing.assert_allclose(of_batch(found[f"{first}.per_sample"]), whole[first], rtol=1e-5)
    for name in ("first.weight", "last.weight"):
        rows = found[f"{name}.per_sample_grad"]
        assert rows.shape[0] == 5
        np.testing.assert_allclose(of_batch(rows, axis=0), whole[f"{name}.grad"], rtol=1e-4, atol=1e-6)
    factor = 5 if reduction == "mean" else 1  # of a mean, a sample alone is all there is
    np.testing.assert_allclose(found["x.per_sample_grad"], whole["x.grad"] * factor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", MIXED)
def test_samples_that_mix_are_refused(kind: str) -> None:
    model = exported(Net(MIXED[kind]))
    with pytest.raises(DifferentiationError, match="so the gradient of one sample may differ from its share"):
        gg.per_sample_gradients(model)
    gg.per_sample_gradients(model, independent=True)


def test_a_norm_by_the_batch_is_refused_and_the_jacobian_of_losses_is_right() -> None:
    constants = {"w": tensor(2), "b": tensor(2), "m": np.zeros(2, np.float32), "v": np.ones(2, np.float32)}
    nodes = [
        node("BatchNormalization", ["x", "w", "b", "m", "v"], ["z", "m2", "v2"], training_mode=1),
        node("Tanh", ["z"], ["t"]),
        node("ReduceSum", ["t", "one"], ["losses"], keepdims=0),
        node("ReduceMean", ["losses"], ["loss"], keepdims=0),
    ]
    model = model_of(nodes, {"x": ["n", 2]}, {"losses": ["n"], "loss": []}, {**constants, "one": np.array([1])})
    with pytest.raises(DifferentiationError, match="statistics of the whole batch") as caught:
        gg.per_sample_gradients(model, output="loss", wrt="w")
    assert "--independent" in caught.value.in_shell()
    feeds = {"x": tensor(6, 2)}
    rows = run(gg.jacobian(model, output="losses", wrt="w"), feeds)["w.jacobian"]
    whole = run(gg.value_and_grad(model, output="loss", wrt="w"), feeds)["w.grad"]
    np.testing.assert_allclose(rows.mean(0), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("size", "apart"), [([1, 4], True), ([4], True), ([3, 4], False), (["rows", 4], False)])
def test_a_tensor_beside_the_samples(size: list[Any], apart: bool) -> None:
    """What has three rows of its own fits to three samples, and to one, which it would repeat."""
    nodes = [
        node("Add", ["x", "beside"], ["y"]),
        node("Mul", ["y", "y"], ["z"]),
        node("ReduceMean", ["z"], ["loss"], keepdims=0),
    ]
    model = model_of(nodes, {"x": ["n", 4], "beside": size}, {"loss": []})
    if apart:
        gg.per_sample_gradients(model, wrt="x")
        return
    with pytest.raises(DifferentiationError, match="whose size along the sample axis is not 1"):
        gg.per_sample_gradients(model, wrt="x")


def test_a_loss_for_each_sample() -> None:
    model = exported(Net(reduction="none"))
    found = run(gg.per_sample_gradients(model), {"x": tensor(4, 4), "target": np.arange(4) % 3})
    assert [v.shape for v in found.values()] == [(4,), (4, 6, 4), (4, 6), (4, 3, 6), (4, 3)]


@pytest.mark.parametrize(("last", "apart"), [("Div", True), ("Mul", False)])
def test_a_choice_by_a_sum_over_samples_is_only_to_divide_by(last: str, apart: bool) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21]> g (float[N] x, float[N] c) => (float loss)
        <float w = {{2.0}}, float zero = {{0.0}}, float one = {{1.0}}>
        {{ s = ReduceSum<keepdims = 0>(c)  e = Equal(s, zero)  d = Where(e, one, s)
          y = Mul(x, w)  t = ReduceSum<keepdims = 0>(y)  loss = {last}({"t, d" if apart else "d, w"}) }}"""
    model = onnx.parser.parse_model(text)
    if apart:
        found = run(gg.per_sample_gradients(model, wrt="w"), {"x": np.float32([3, 4]), "c": np.float32([2, 0])})
        np.testing.assert_allclose(found["w.per_sample_grad"], [1.5, 4.0])
        return
    with pytest.raises(DifferentiationError, match="is applied to a sum or a mean over the samples"):
        gg.per_sample_gradients(model, wrt="w")


# --- errors, and the command line ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: gg.jacobian(m, mode="sideways"), ArgumentError, "'auto', 'reverse' or 'forward'"),
        (lambda m: gg.jacobian(m, output="nothing"), UnknownNameError, "no output 'nothing'"),
        (lambda m: gg.jacobian(m, wrt="w", per_sample=True), DifferentiationError, "'w' is not an input with one row"),
        (
            lambda m: gg.jacobian(m, output="loss", wrt="x", per_sample=True),
            DifferentiationError,
            "does not have one row per sample",
        ),
        (lambda m: gg.hessian(m, output="y"), DifferentiationError, "needs a scalar"),
        (lambda m: gg.per_sample_gradients(m), DifferentiationError, "needs a scalar"),
        (lambda m: gg.per_sample_gradients(m, output="loss", inputs="z*"), UnknownNameError, "no input matches 'z*'"),
    ],
)
def test_errors(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words.replace("*", r"\*")):
        call(squares())


def test_a_fixed_batch_is_no_batch() -> None:
    model = squares()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    with pytest.raises(DifferentiationError, match="no input of the model has a dynamic first axis"):
        gg.per_sample_gradients(model, output="loss")
    with pytest.raises(DifferentiationError, match="whose first axis is not symbolic"):
        gg.per_sample_gradients(model, output="loss", inputs="x")


@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        (["--vjp", "--output", "y", "--output", "loss"], ["y", "loss", "x.grad"]),
        (["--jvp", "--output", "y"], ["y", "loss", "y.tangent"]),
        (["--hvp", "--output", "loss"], ["y", "loss", "x.hvp"]),
        (["--jacobian", "--mode", "forward"], ["y", "loss", "x.jacobian"]),
        (["--jacobian", "--per-sample"], ["y", "loss", "x.jacobian"]),
        (["--hessian", "--output", "loss"], ["y", "loss", "x.hessian"]),
        (["--per-sample", "--output", "loss"], ["loss.per_sample", "x.per_sample_grad"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_from_the_shell(
    options: list[str], outputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(squares(), tmp_path / "model.onnx")
    out = tmp_path / "out.onnx"
    assert command(["grad", str(tmp_path / "model.onnx"), "--wrt", "x", *options, "-o", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["outputs"] == outputs
    assert report["inputs"][0] == "x"
    onnx.checker.check_model(str(out))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--vjp", "--jvp"], "--vjp and --jvp cannot be combined"),
        (["--hvp", "--per-sample"], "--per-sample can be combined only with --jacobian"),
        (["--independent"], "--independent requires --per-sample"),
        (["--mode", "reverse"], "--mode requires --jacobian"),
        (["--output", "y", "--output", "loss"], "only --vjp and --jvp accept several --output"),
    ],
)
def test_options_that_do_not_fit(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(squares(), tmp_path / "model.onnx")
    assert command(["grad", str(tmp_path / "model.onnx"), *options]) == 2
    assert words in capsys.readouterr().err

"""A model from a file as a part of a network: the same numbers, its weights under their names, trained or not."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import gradgraph as gg
from gradgraph import frontend
from gradgraph.cli.digits import network
from gradgraph.errors import ModelError, UnknownNameError
from gradgraph.frontend import Input, export, nn
from tests.kit.running import run

FLOAT, INT = np.float32, np.int64
MODELS = {
    "symbolic sizes": ("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 2, 3] x) => (float[n, m] y) <int64[2] to = {0, -1}> { y = Reshape (x, to) }""", {}),
    "an old opset": ("""<ir_version: 4, opset_import: ["" : 9]>
        g (float[n, 2, 3] x) => (float[n, 3] y) { s = ReduceSum <axes = [1], keepdims = 0> (x)
            y = Clip <min = -1.0> (s) }""", {}),
    "a branch that reads a weight": ("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 2, 3] x) => (float[n, 2, 3] y) <float[3] w> {
            s = ReduceSum <keepdims = 0> (x)
            zero = Constant <value = float {0.0}> ()
            c = Greater (s, zero)
            y = If (c) <then_branch = t () => (float[n, 2, 3] a) { a = Mul (x, w) },
                        else_branch = e () => (float[n, 2, 3] b) { b = Neg (x) }>
        }""", {"w": (3,)}),
    "a loop": ("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 2, 3] x) => (float[n, 2, 3] y) <float[3, 3] w, int64 trips = {3}, bool go = {1}> {
            y = Loop (trips, go, x) <body = b (int64 i, bool c, float[n, 2, 3] h) => (bool d, float[n, 2, 3] k) {
                d = Identity (c)
                m = MatMul (h, w)
                k = Tanh (m)
            }>
        }""", {"w": (3, 3)}),
    "a function": ("""<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        g (float[n, 2, 3] x) => (float[n, 2, 3] y) <float[3] w> { y = own.Gate (x, w) }
        <opset_import: ["" : 21], domain: "own">
        Gate (x, w) => (y) { s = Sigmoid (w)
            y = Mul (x, s) }""", {"w": (3,)}),
    "an output that is an input": ("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 2, 3] x) => (float[n, 2, 3] x, float[n, 2, 3] y) { y = Abs (x) }""", {}),
}  # fmt: skip


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(FLOAT)


def model_of(text: str, weights: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    for name, shape in weights.items():
        for known in [i for i in model.graph.initializer if i.name == name]:
            model.graph.initializer.remove(known)
        model.graph.initializer.append(numpy_helper.from_array(drawn(*shape), name))
    return model


class Around(nn.Module):
    """A network that does nothing but call the model, twice."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = frontend.from_onnx(model)

    def forward(self, x: Any) -> Any:
        first, second = self.inner(x), self.inner(2 * x)
        return [*first.values(), *second.values()] if isinstance(first, dict) else [first, second]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", ["rows", 4])
def test_it_computes_what_the_file_does_each_time(name: str, size: Any) -> None:
    model = model_of(*MODELS[name])
    net = Around(model)
    assert dict(net.named_parameters()).keys() == {f"inner.{w}" for w in MODELS[name][1]}
    written = export(net, {"x": (size, 2, 3)})
    onnx.checker.check_model(written, full_check=True)
    assert {i.name for i in written.graph.initializer} == {f"inner.{w}" for w in MODELS[name][1]}
    x = drawn(4, 2, 3)
    wanted = [*run(model, {"x": x}).values(), *run(model, {"x": 2 * x}).values()]
    for found, expected in zip(run(written, {"x": x}).values(), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


class Other(nn.Module):
    """Another head on the digits network, whose trunk is cut at an inner value."""

    def __init__(self, source: Any, cut: str = "features.6/MaxPool") -> None:
        super().__init__()
        self.trunk = frontend.from_onnx(source, cut)
        self.head = nn.Linear(512, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.trunk(x).flatten(1))


def test_a_trunk_gets_another_head_and_trains_as_it_should(tmp_path: Any) -> None:
    path = tmp_path / "digits.onnx"
    path.write_bytes(network(0).SerializeToString())
    net = Other(path)
    names = [name for name, _ in net.named_parameters()]
    assert names[0] == "trunk.features.0.weight" and names[-1] == "head.bias" and len(names) == 10
    assert next(n for n, _ in net.named_buffers()) == "trunk.features.1.running_mean"
    model = export(net, {"x": ("batch", 1, 8, 8)}, outputs=["logits"])
    before = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(16, 1, 8, 8)).astype(FLOAT), "target": rng.integers(0, 2, 16)}
    step = gg.build(model, optimizer=gg.optim.sgd(0.1), freeze="trunk.*")
    assert set(step.manifest.trainable) == {"head.weight", "head.bias"}
    whole = gg.Trainer(gg.build(model, optimizer=gg.optim.sgd(0.1)))
    whole.step(data)
    after = whole.state_dict()
    moved = {n for n in before if np.any(before[n] != after[n])}  # running statistics, too
    assert moved >= set(before) - {"trunk.features.0.bias", "trunk.features.3.bias"}  # a norm takes these away
    exported = whole.export()
    assert [n.op_type for n in exported.graph.node].count("Flatten") == 1


@pytest.mark.sweep(0)
def test_the_trunk_is_as_the_network_that_was_written_whole() -> None:
    """Two frontends: the file's nodes, and the modules that wrote them, train along the same losses."""
    x = np.random.default_rng(1).normal(size=(16, 1, 8, 8)).astype(FLOAT)
    batch = {"x": x, "target": np.arange(16) % 10}
    losses = []
    for model in (network(0), export(frontend.from_onnx(network(0)), {"x": ("rows", 1, 8, 8)})):
        trainer = gg.Trainer(gg.build(model, optimizer=gg.optim.sgd(0.1), seed=3))
        losses.append([float(trainer.step(batch)["loss"]) for _ in range(5)])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def two_in_two_out() -> onnx.ModelProto:
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 3] x, int64[n] place) => (float[n, 3] sum, float[n, 3] rest) <float[9, 3] table> {
            row = Gather (table, place)
            sum = Add (x, row)
            rest = Sub (x, row)
        }"""
    return model_of(text, {"table": (9, 3)})


def test_inputs_and_outputs_go_by_name() -> None:
    source = two_in_two_out()
    inner = frontend.from_onnx(ir.from_proto(source), ["rest", "row"])

    def net(x: Any, place: Any) -> Any:
        return inner(place=place, x=x)

    inputs = {"x": (None, 3), "place": Input((None,), "int64")}
    with pytest.raises(ModelError, match="belongs to no module"):
        export(net, inputs)
    model = export(inner, {"x": ("n", 3), "place": Input(("n",), "int64")})
    x, place = drawn(5, 3), np.arange(5)
    found, wanted = run(model, {"x": x, "place": place}), run(source, {"x": x, "place": place})
    assert list(found) == ["rest", "row"]
    np.testing.assert_array_equal(found["rest"], wanted["rest"])


class Misuse(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.inner, self.call = frontend.from_onnx(two_in_two_out()), call

    def forward(self, x: Any, place: Any) -> Any:
        return self.call(self.inner, x, place)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda inner, x, place: inner(x), "takes 'x', 'place'; pass each once"),
        (lambda inner, x, place: inner(x, place, x=x), "pass each once"),
        (lambda inner, x, place: inner(x, places=place), "and 'places' by name"),
        (lambda inner, x, place: inner(place, x), "'x' of the model is float, but got int64"),
        (lambda inner, x, place: inner(x[:, :2], place), r"has shape \(n, 3\), but got \(n, 2\)"),
    ],
)
def test_a_slip_is_named(call: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        export(Misuse(call), {"x": ("n", 3), "place": Input(("n",), "int64")})


def test_an_output_that_there_is_not() -> None:
    with pytest.raises(UnknownNameError, match=r"no output or inner value 'features\.6/MaxPol'; did you mean"):
        Other(network(0), "features.6/MaxPol")


def test_copies_are_independent_and_other_types_are_refused() -> None:
    first = frontend.from_onnx(network(0))
    second = copy.deepcopy(first)
    second.load_state_dict({"head.4.bias": np.full(10, 7, np.float32)}, strict=False)
    found = {i.name: numpy_helper.to_array(i) for i in export(second, {"x": ("n", 1, 8, 8)}).graph.initializer}
    assert found["head.4.bias"].tolist() == [7.0] * 10
    assert np.all(first.state_dict()["head.4.bias"] != 7)
    with pytest.raises(ModelError, match=r"is now float16\[.*convert the file instead"):
        export(first.to("float16"), {"x": ("n", 1, 8, 8)})

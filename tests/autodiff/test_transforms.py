"""value_and_grad and vjp: names, shapes, paths, composition and errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph.errors import DifferentiationError, ModelError
from gradgraph.graph.builder import Builder
from tests.kit.running import run

RNG = np.random.default_rng(0)
Spec = tuple[str, int, list[Any]]


def model(
    nodes: list[Any], inputs: list[Spec], outputs: list[Spec], weights: dict[str, np.ndarray] | None = None
) -> onnx.ModelProto:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "test",
        [info(*i) for i in inputs],
        [info(*o) for o in outputs],
        [numpy_helper.from_array(v, k) for k, v in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


node = helper.make_node
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def regression() -> onnx.ModelProto:
    """mean((tanh(x·w) + b)²); the batch is symbolic."""
    return model(
        [
            node("MatMul", ["x", "w"], ["h"]),
            node("Tanh", ["h"], ["t"]),
            node("Add", ["t", "b"], ["y"]),
            node("Mul", ["y", "y"], ["sq"]),
            node("ReduceMean", ["sq"], ["loss"], keepdims=0),
        ],
        [("x", FLOAT, ["batch", 3])],
        [("loss", FLOAT, []), ("y", FLOAT, ["batch", 2])],
        {"w": RNG.normal(size=(3, 2)).astype(np.float32), "b": np.array([0.1, -0.2], np.float32)},
    )


def by_hand(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    t = np.tanh(x @ w)
    dy = 2 * (t + b) / t.size
    dh = dy * (1 - t * t)
    return {"w.grad": x.T @ dh, "b.grad": dy.sum(0), "x.grad": dh @ w.T}


@pytest.mark.parametrize("batch", [1, 4, 7])
def test_gradients_at_every_batch_size(batch: int) -> None:
    m = regression()
    w, b = (numpy_helper.to_array(t) for t in m.graph.initializer)
    x = RNG.normal(size=(batch, 3)).astype(np.float32)
    result = run(gg.value_and_grad(m, wrt=["w", "b", "x"]), {"x": x})
    assert list(result) == ["loss", "w.grad", "b.grad", "x.grad"]
    for name, expected in by_hand(x, w, b).items():
        np.testing.assert_allclose(result[name], expected, rtol=1e-5, atol=1e-6)


def test_wrt_defaults_to_the_trainable_weights() -> None:
    result = gg.value_and_grad(regression())
    assert [o.name for o in result.graph.output] == ["loss", "w.grad", "b.grad"]
    onnx.checker.check_model(result, full_check=True)


def test_gradients_have_shape_and_type_of_their_tensor() -> None:
    result = gg.value_and_grad(regression(), wrt="*")
    types = {o.name: o.type.tensor_type for o in result.graph.output}
    assert [d.dim_param or d.dim_value for d in types["x.grad"].shape.dim] == ["batch", 3]
    assert types["w.grad"].elem_type == FLOAT


def test_the_kind_of_model_that_went_in_comes_out(tmp_path: Any) -> None:
    m = regression()
    path = tmp_path / "m.onnx"
    onnx.save(m, path)
    before = m.SerializeToString()
    assert isinstance(gg.value_and_grad(path), onnx.ModelProto)
    assert isinstance(gg.value_and_grad(str(path)), onnx.ModelProto)
    assert isinstance(gg.value_and_grad(m), onnx.ModelProto)
    assert isinstance(gg.value_and_grad(ir.from_proto(m)), ir.Model)
    assert m.SerializeToString() == before


def test_vjp_is_linear_in_the_cotangent() -> None:
    m = gg.vjp(regression(), outputs="y", wrt="x")
    assert [i.name for i in m.graph.input] == ["x", "y.cotangent"]
    assert [o.name for o in m.graph.output] == ["loss", "y", "x.grad"]
    x = RNG.normal(size=(2, 3)).astype(np.float32)
    rows = [run(m, {"x": x, "y.cotangent": np.eye(4, dtype=np.float32)[i].reshape(2, 2)})["x.grad"] for i in range(4)]
    c = RNG.normal(size=(2, 2)).astype(np.float32)
    combined = run(m, {"x": x, "y.cotangent": c})["x.grad"]
    np.testing.assert_allclose(combined, np.tensordot(c.reshape(4), rows, 1), rtol=1e-4, atol=1e-6)


def test_transforms_compose_to_second_order() -> None:
    """d/dx of Σ (d/dx Σ x⁴) is 12 x²; the second gradient's name is the next free one."""
    quartic = model(
        [node("Pow", ["x", "four"], ["p"]), node("ReduceSum", ["p"], ["loss"], keepdims=0)],
        [("x", FLOAT, [3])],
        [("loss", FLOAT, [])],
        {"four": np.array(4.0, np.float32)},
    )
    first = gg.value_and_grad(quartic, wrt="x")
    second = gg.vjp(first, outputs="x.grad", wrt="x")
    x = np.array([1.0, -2.0, 0.5], np.float32)
    result = run(second, {"x": x, "x.grad.cotangent": np.ones(3, np.float32)})
    assert list(result) == ["loss", "x.grad", "x.grad_1"]
    np.testing.assert_allclose(result["x.grad_1"], 12 * x * x, rtol=1e-5)


def test_a_value_read_many_times_collects_every_cotangent() -> None:
    m = model(
        [
            node("Mul", ["x", "x"], ["a"]),
            node("Sum", ["x", "a", "x"], ["s"]),
            node("ReduceSum", ["s"], ["loss"], keepdims=0),
        ],
        [("x", FLOAT, ["n"])],
        [("loss", FLOAT, [])],
    )
    x = np.array([1.0, -3.0], np.float32)
    np.testing.assert_allclose(run(gg.value_and_grad(m, wrt="x"), {"x": x})["x.grad"], 2 * x + 2)


def test_a_tensor_that_is_the_target_itself() -> None:
    m = model([node("Identity", ["x"], ["loss"])], [("x", FLOAT, [1, 1])], [("loss", FLOAT, [1, 1])])
    assert run(gg.value_and_grad(m, wrt="x"), {"x": np.ones((1, 1), np.float32)})["x.grad"].tolist() == [[1.0]]


def test_integer_paths_stop_gradients() -> None:
    m = model(
        [
            node("Cast", ["x"], ["i"], to=INT64),
            node("Cast", ["i"], ["f"], to=FLOAT),
            node("Mul", ["f", "w"], ["p"]),
            node("ReduceSum", ["p"], ["loss"], keepdims=0),
        ],
        [("x", FLOAT, [2])],
        [("loss", FLOAT, [])],
        {"w": np.ones(2, np.float32)},
    )
    np.testing.assert_allclose(run(gg.value_and_grad(m), {"x": np.array([1.5, 2.5], np.float32)})["w.grad"], [1, 2])
    with pytest.raises(gg.errors.DifferentiationError, match=r"does not depend on 'x': its path ends at .* \(Cast\)"):
        gg.value_and_grad(m, wrt="x")
    zeros = run(gg.value_and_grad(m, wrt="x", allow_unused=True), {"x": np.ones(2, np.float32)})
    assert zeros["x.grad"].tolist() == [0.0, 0.0]


def test_numbers_in_formulas_are_no_parameters() -> None:
    m = model(
        [
            node("Constant", [], ["k"], value=numpy_helper.from_array(np.array([2.0, 3.0], np.float32))),
            node("Mul", ["x", "k"], ["a"]),
            node("Mul", ["a", "val_7"], ["b"]),
            node("Mul", ["b", "temperature"], ["c"]),
            node("Mul", ["c", "val_8"], ["d"]),
            node("ReduceSum", ["d"], ["loss"], keepdims=0),
        ],
        [("x", FLOAT, [2])],
        [("loss", FLOAT, [])],
        {
            "val_7": np.array(0.125, np.float32),
            "val_8": np.array([0.6], np.float32),  # attention's 1/√d, as PyTorch's exporter writes it
            "temperature": np.array(1.0, np.float32),
        },
    )
    assert [o.name for o in gg.value_and_grad(m).graph.output] == ["loss", "x.grad"]
    assert [o.name for o in gg.value_and_grad(m, wrt=["temperature", "val_7"]).graph.output] == [
        *("loss", "temperature.grad", "val_7.grad")
    ]


def test_operators_without_a_rule_fall_back_to_their_body() -> None:
    m = model(
        [node("Softsign", ["x"], ["s"]), node("MeanVarianceNormalization", ["s"], ["y"], axes=[0])],
        [("x", FLOAT, [4])],
        [("y", FLOAT, [4])],
    )
    result = gg.vjp(m, wrt="x")
    feeds = {"x": RNG.normal(size=4).astype(np.float32), "y.cotangent": np.ones(4, np.float32)}
    assert abs(run(result, feeds)["x.grad"]).max() < 1e-4  # a normalised tensor's sum does not change


def test_statistics_of_a_norm_in_training_mode_are_no_way_to_its_output() -> None:
    """As PyTorch writes weights that it standardises: what only the ignored statistics read is no parameter."""
    norm = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21]>
    net (float[3, 2] x) => (float[3, 2] y)
    <float[3, 2] w = {1, 2, 3, 5, 8, 7}, float[2] scale = {1, 2}, float[2] bias = {0, 1}, float[2] var = {1, 1}> {
        mean = ReduceMean <keepdims = 0> (w, zero)
        n, new_mean, new_var = BatchNormalization <training_mode = 1> (x, scale, bias, mean, var)
        y = Mul (n, n)
    }""")
    norm.graph.initializer.append(numpy_helper.from_array(np.array([0]), "zero"))
    assert [o.name for o in gg.vjp(norm).graph.output][1:] == ["scale.grad", "bias.grad"]
    norm.graph.output.append(helper.make_tensor_value_info("new_mean", 1, [2]))
    x = RNG.normal(size=(3, 2)).astype(np.float32)
    feeds = {"x": x, "y.cotangent": 0 * x, "new_mean.cotangent": np.ones(2, np.float32)}
    gradient = run(gg.vjp(norm, wrt=["w", "x"]), feeds)
    np.testing.assert_allclose(gradient["w.grad"], np.full((3, 2), 0.9 / 3), rtol=1e-6)
    np.testing.assert_allclose(gradient["x.grad"], np.full((3, 2), 0.1 / 3), rtol=1e-5)


def test_a_target_that_falls_back_to_its_body_keeps_every_path() -> None:
    nodes = [node("CenterCropPad", ["x", "size"], ["z"], axes=[0]), node("Neg", ["z"], ["w"])]
    m = model(nodes, [("x", FLOAT, [4])], [("z", FLOAT, [2]), ("w", FLOAT, [2])], {"size": np.array([2])})
    result = gg.vjp(m, wrt="x")
    assert [i.name for i in result.graph.input] == ["x", "z.cotangent", "w.cotangent"]
    two, one = np.full(2, 2, np.float32), np.ones(2, np.float32)
    found = run(result, {"x": np.zeros(4, np.float32), "z.cotangent": two, "w.cotangent": one})["x.grad"]
    assert found.tolist() == [0, 1, 1, 0]


def chain(length: int) -> onnx.ModelProto:
    names = [f"v{i}" for i in range(length)]
    nodes = [node("Sin", [a], [b]) for a, b in zip(["x", *names], names, strict=False)]
    nodes.append(node("ReduceSum", [names[-1]], ["loss"], keepdims=0))
    return model(nodes, [("x", FLOAT, [2])], [("loss", FLOAT, [])])


@pytest.mark.sweep(0)
def test_a_long_chain_needs_no_recursion() -> None:
    result = gg.value_and_grad(chain(3_000), wrt="x")
    assert len(result.graph.node) < 9_010  # Sin, and Cos and Mul behind each


@pytest.mark.sweep(0)
def test_a_value_with_very_many_readers() -> None:
    readers = 3000
    nodes = [node("Mul", ["x", "w"], [f"p{i}"]) for i in range(readers)]
    nodes += [node("Sum", [f"p{i}" for i in range(readers)], ["s"]), node("ReduceSum", ["s"], ["loss"], keepdims=0)]
    m = model(nodes, [("x", FLOAT, [2])], [("loss", FLOAT, [])], {"w": np.ones(2, np.float32)})
    x = np.array([1.0, 2.0], np.float32)
    np.testing.assert_allclose(run(gg.value_and_grad(m), {"x": x})["w.grad"], readers * x)


def custom() -> onnx.ModelProto:
    m = model(
        [
            node("Wobble", ["x"], ["a"], domain="acme", name="/head/Wobble"),
            node("Wobble", ["a"], ["b"], domain="acme", name="/head/Wobble_1"),
            node("Jiggle", ["b"], ["c"], domain="acme", name="/head/Jiggle"),
            node("ReduceSum", ["c"], ["loss"], keepdims=0),
        ],
        [("x", FLOAT, [2])],
        [("loss", FLOAT, [])],
    )
    m.opset_import.append(helper.make_opsetid("acme", 1))
    m.graph.value_info.extend(helper.make_tensor_value_info(n, FLOAT, [2]) for n in "abc")
    return m


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "missing rules are listed all at once": (
        lambda: gg.value_and_grad(custom(), wrt="x"),
        gg.errors.UnsupportedOperatorError,
        r"acme.Wobble \(nodes '/head/Wobble', '/head/Wobble_1'\), acme.Jiggle \(node '/head/Jiggle'\); register one",
    ),
    "unknown output": (
        lambda: gg.value_and_grad(regression(), output="los"),
        gg.errors.UnknownNameError,
        "did you mean 'loss'",
    ),
    "unknown name": (lambda: gg.value_and_grad(regression(), wrt="W1"), gg.errors.UnknownNameError, "matches 'W1'"),
    "unknown glob": (
        lambda: gg.value_and_grad(regression(), wrt="conv*"),
        gg.errors.UnknownNameError,
        r"matches 'conv\*'",
    ),
    "no scalar": (
        lambda: gg.value_and_grad(regression(), output="y"),
        gg.errors.DifferentiationError,
        r"needs a scalar",
    ),
    "unused": (
        lambda: gg.value_and_grad(
            model(
                [node("ReduceSum", ["x"], ["loss"], keepdims=0)],
                [("x", FLOAT, [2]), ("z", FLOAT, [2])],
                [("loss", FLOAT, [])],
            ),
            wrt=["x", "z"],
        ),
        gg.errors.DifferentiationError,
        "does not depend on 'z': nothing reads it",
    ),
    "integer input": (
        lambda: gg.vjp(
            model(
                [node("Gather", ["w", "i"], ["y"])],
                [("i", INT64, [2])],
                [("y", FLOAT, [2])],
                {"w": np.ones(3, np.float32)},
            ),
            wrt="i",
        ),
        gg.errors.DifferentiationError,
        "'i' has dtype int64",
    ),
    "integer output": (
        lambda: gg.value_and_grad(
            model([node("ArgMax", ["x"], ["y"], keepdims=0)], [("x", FLOAT, [3])], [("y", INT64, [])]), wrt="x"
        ),
        gg.errors.DifferentiationError,
        "'y' has dtype int64",
    ),
    "ends at a step function": (
        lambda: gg.vjp(model([node("Floor", ["x"], ["y"])], [("x", FLOAT, [3])], [("y", FLOAT, [3])])),
        gg.errors.DifferentiationError,
        r"ends at .* \(Floor\), .* piecewise constant",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_sentence(name: str) -> None:
    ask, kind, says = ERRORS[name]
    with pytest.raises(kind, match=says) as caught:
        ask()
    assert "\n" not in str(caught.value)


def test_a_name_that_is_taken_gets_the_next_free_one():
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    cube (float[3] x) => (float s) { a = Mul (x, x)  b = Mul (a, x)  s = ReduceSum <keepdims = 0> (b) }""")
    first = gg.value_and_grad(model, output="s", wrt="x")
    assert [o.name for o in first.graph.output] == ["s", "x.grad"]
    second = gg.vjp(first, outputs="x.grad", wrt="x")
    assert [o.name for o in second.graph.output] == ["s", "x.grad", "x.grad_1"]
    x, v = np.array([1, 2, 3], np.float32), np.ones(3, np.float32)
    found = run(second, {"x": x, "x.grad.cotangent": v})
    assert np.allclose(found["x.grad"], 3 * x**2)
    assert np.allclose(found["x.grad_1"], 6 * x)
    again = gg.jvp(gg.jvp(model, wrt="x"), wrt="x")
    assert [i.name for i in again.graph.input] == ["x", "x.tangent", "x.tangent_1"]
    assert [o.name for o in again.graph.output] == ["s", "s.tangent", "s.tangent_1", "s.tangent.tangent"]


def test_a_model_may_hold_strings() -> None:
    """Labels of classes, say: they are no weights and have no size in bytes."""
    m = model(
        [node("Identity", ["names"], ["labels"]), node("Mul", ["x", "w"], ["y"])],
        [("x", FLOAT, [2])],
        [("y", FLOAT, [2]), ("labels", onnx.TensorProto.STRING, [2])],
        {"w": np.ones(2, np.float32)},
    )
    m.graph.initializer.append(onnx.helper.make_tensor("names", onnx.TensorProto.STRING, [2], [b"cat", b"dog"]))
    found = gg.vjp(m, outputs=["y"], wrt=["w"])
    results = run(found, {"x": np.full(2, 3, np.float32), "y.cotangent": np.ones(2, np.float32)})
    np.testing.assert_array_equal(results["w.grad"], [3, 3])


def test_sizes_beyond_64_bits_are_named() -> None:
    pooled = node("RoiAlign", ["x", "rois", "images"], ["y"], output_height=2, output_width=3, mode="max")
    images = {"images": np.zeros(4, np.int64)}
    m = model([pooled], [("x", FLOAT, [2, 3, 6, 2**62]), ("rois", FLOAT, [4, 4])], [("y", FLOAT, None)], images)
    with pytest.raises(ModelError, match=r"'x' is declared with the sizes .*, more than 2\*\*63 elements"):
        gg.vjp(m, wrt="x")
    with pytest.raises(ModelError, match="do not fit into 64 bits"):  # of what a rule computes with
        Builder().const([2**63])


@pytest.mark.parametrize("call", [gg.value_and_grad, gg.vjp, gg.jvp, gg.hvp, gg.check_gradients])
def test_outputs_and_wrt_are_named(call: Callable[..., Any]) -> None:
    """Their order differs from call to call in a reader's mind; what they say must not depend on it."""
    kinds = {p.name: p.kind for p in inspect.signature(call).parameters.values()}
    (of,) = {"output", "outputs"} & kinds.keys()
    assert kinds["wrt"] == kinds[of] == inspect.Parameter.KEYWORD_ONLY


def test_a_cast_to_the_undeclared_type_of_a_state() -> None:
    """The state of the Scan gets the type of its initial value, so CastLike has a gradient."""
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[2] x, float[3, 2] u, int64 n) => (float[2] y, float z) {
        y, z = Scan <num_scan_inputs = 1, body = b (float[2] s, float[2] v) => (float[2] t, float w) {
            c = CastLike (n, s)  m = Mul (c, v)  t = Add (m, s)  w = ReduceSum (t)
        }> (x, u) }"""
    model = onnx.parser.parse_model(text)
    body = next(a.g for a in model.graph.node[0].attribute if a.name == "body")
    body.input[0].type.tensor_type.ClearField("elem_type")
    feeds = {
        "x": np.ones(2),
        "u": np.arange(6).reshape(3, 2),
        "y.cotangent": np.ones(2),
        "z.cotangent": np.ones((3, 1)),
    }
    typed = {name: array.astype(np.float32) for name, array in feeds.items()}
    gradient = run(gg.vjp(model, wrt=["u"]), typed | {"n": np.array(2)})["u.grad"]
    np.testing.assert_allclose(gradient, 2 * np.array([[4, 4], [3, 3], [2, 2]]))


@pytest.mark.parametrize("step", [-(2**63), 2**63 - 1])
def test_a_step_that_64_bits_hardly_hold(step: int) -> None:
    """The least of them has no opposite. Either takes one row."""
    numbers = {"b": 1, "e": 6 if step > 0 else 0, "a": 0, "s": step}
    tensors = [numpy_helper.from_array(np.array([v]), k) for k, v in numbers.items()]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in (("x", [4, 6]), ("y", None))]
    graph = helper.make_graph([helper.make_node("Slice", ["x", *numbers], ["y"])], "g", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    feeds = {"x": np.ones((4, 6), np.float32), "y.cotangent": np.ones((1, 6), np.float32)}
    gradient = run(gg.vjp(model), feeds)["x.grad"]
    np.testing.assert_array_equal(gradient, np.eye(4, dtype=np.float32)[1][:, None] * np.ones(6))


@pytest.mark.parametrize("transform", [gg.value_and_grad, gg.hvp, gg.hessian])
@pytest.mark.parametrize("first", ["n", 3])
def test_an_open_batch_is_no_scalar(transform: Any, first: Any) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [first, 6])]
    weights = [numpy_helper.from_array(np.ones((6, 1), np.float32), "w")]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [first, 1])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(DifferentiationError, match="a gradient needs a scalar"):
        transform(model, wrt="x")


def test_an_output_that_no_input_reaches_is_not_the_default() -> None:
    nodes = [helper.make_node("Identity", ["v"], ["version"]), helper.make_node("MatMul", ["x", "w"], ["y"])]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("version", [1]), ("y", [1, 1]))]
    weights = {"v": np.array([3], np.float32), "w": np.ones((2, 1), np.float32)}
    graph = helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(a, n) for n, a in weights.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert [o.name for o in gg.value_and_grad(model).graph.output] == ["y", "w.grad"]
    assert gg.build(model, "mse").manifest.trainable == ("w",)


def test_an_output_of_unknown_size_must_have_one_element() -> None:
    """The seed is reshaped to the shape of the output, and no simplification may remove this check."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[?] x) => (float[?] y) { y = Sin(x) }'
    )
    gradient = gg.value_and_grad(model, output="y", wrt=["x"])
    session = ort.InferenceSession(gradient.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(["x.grad"], {"x": np.zeros(1, np.float32)})
    assert found == 1
    with pytest.raises(Exception, match="cannot be reshaped"):
        session.run(["x.grad"], {"x": np.zeros(3, np.float32)})

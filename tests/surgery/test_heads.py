"""A new head on every kind of last layer: the rest gives what it gave, and the head has the new classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import ArgumentError, ModelError, UnknownNameError

RNG = np.random.default_rng(0)
X, IMAGE, TOKENS = "float[batch, 6] x", "float[batch, 3, 4, 4] x", "int64[batch, time] x"
LOGITS = "float[batch, 5] y"

# how the last layer may stand: input, nodes, output, weights; w and b are the head's
HEADS = {
    "Gemm": (X, "h = Relu(x) y = Gemm<transB=1>(h, w, b)", LOGITS, {"w": (5, 6), "b": (5,)}),
    "Gemm as it multiplies": (X, "h = Relu(x) y = Gemm(h, w, b)", LOGITS, {"w": (6, 5), "b": (5,)}),
    "Gemm, no bias": (X, "y = Gemm<transB=1>(x, w)", LOGITS, {"w": (5, 6)}),
    "MatMul and Add": (X, "p = MatMul(x, w) y = Add(b, p)", LOGITS, {"w": (6, 5), "b": (5,)}),
    "MatMul": (X, "y = MatMul(x, w)", LOGITS, {"w": (6, 5)}),
    "nodes that do nothing": (
        X,
        "p = MatMul(x, w) c = Cast<to=1>(p) i = Identity(c) a = Add(i, b) d = Cast<to=1>(a) y = Softmax(d)",
        LOGITS,
        {"w": (6, 5), "b": (5,)},
    ),
    "a weight that is turned": (
        X,
        "t = Transpose<perm=[1, 0]>(w) p = MatMul(x, t) y = Add(p, b)",
        LOGITS,
        {"w": (5, 6), "b": (5,)},
    ),
    "probabilities": (X, "p = Gemm(x, w, b) s = Softmax(p) y = Identity(s)", LOGITS, {"w": (6, 5), "b": (5,)}),
    "Conv under a pool": (
        IMAGE,
        "c = Conv(x, w, b) g = GlobalAveragePool(c) y = Flatten(g)",
        LOGITS,
        {"w": (5, 3, 1, 1), "b": (5,)},
    ),
    "a Conv as output": (IMAGE, "y = Conv<pads=[1,1,1,1]>(x, w)", "float[batch, 5, 4, 4] y", {"w": (5, 3, 3, 3)}),
    "a written target": (
        X,
        "p = Gemm(x, w, b) t = Constant<value_ints=[-1, 5]>() y = Reshape(p, t)",
        LOGITS,
        {"w": (6, 5), "b": (5,)},
    ),
    "a target of parts": (
        X,
        """p = MatMul(x, w) s = Shape<end=1>(x) c = Constant<value_ints=[5]>() t = Concat<axis=0>(s, c)
        y = Reshape(p, t)""",
        LOGITS,
        {"w": (6, 5)},
    ),
    "a tied embedding": (
        TOKENS,
        "e = Gather(w, x) t = Transpose<perm=[1, 0]>(w) y = MatMul(e, t)",
        "float[batch, time, 5] y",
        {"w": (5, 6)},
    ),
    "scaled": (X, "p = MatMul(x, w) y = Div(p, k)", LOGITS, {"w": (6, 5), "k": ()}),
}


def model(name: str) -> onnx.ModelProto:
    given, nodes, result, weights = HEADS[name]
    text = f'<ir_version: 10, opset_import: ["" : 20]> g ({given}) => ({result}) {{ {nodes} }}'
    made = parser.parse_model(text)
    for key, shape in weights.items():
        data = np.asarray(RNG.normal(size=shape), np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(data, key))
    made.metadata_props.add(key="author", value="somebody")
    made.doc_string = "as it was"
    return made


def run(made: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    (y,) = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    return y


def feed(name: str) -> np.ndarray:
    given = HEADS[name][0]
    if given is TOKENS:
        return RNG.integers(0, 5, (2, 3))
    return RNG.normal(size=(2, 6) if given is X else (2, 3, 4, 4)).astype(np.float32)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_has_the_new_classes(name: str) -> None:
    made = surgery.new_head(model(name), 7)
    assert isinstance(made, onnx.ModelProto)
    onnx.checker.check_model(made, full_check=True)
    y = run(made, feed(name))
    assert 7 in y.shape
    declared = [d.dim_value for d in made.graph.output[0].type.tensor_type.shape.dim]
    assert [n for d, n in zip(declared, y.shape, strict=True) if d] == [n for n in y.shape if n in (4, 7)]
    assert made.metadata_props[0].value == "somebody"
    assert made.doc_string == "as it was"
    has_bias = "b" in HEADS[name][3]
    assert {t.name for t in made.graph.initializer if t.name.startswith("head")} == (
        {"head.weight", "head.bias"} if has_bias else {"head.weight"}
    )


@pytest.mark.parametrize("name", HEADS)
def test_with_the_old_numbers_it_is_the_old_model(name: str) -> None:
    old = model(name)
    numbers = {t.name: onnx.numpy_helper.to_array(t) for t in old.graph.initializer}
    fresh = surgery.new_head(old, 5)
    sizes = {t.name: tuple(t.dims) for t in fresh.graph.initializer}
    turned = numbers["w"] if sizes["head.weight"] == numbers["w"].shape else numbers["w"].T
    back = {"head.weight": turned} | ({"head.bias": numbers["b"]} if "b" in numbers else {})
    x = feed(name)
    assert np.abs(run(fresh, x) - run(old, x)).max() > 1e-2
    loaded = surgery.load_weights(fresh, back, strict=False)
    np.testing.assert_allclose(run(loaded, x), run(old, x), rtol=1e-6, atol=1e-6)


def test_numbers_are_drawn_as_those_of_a_layer_of_pytorch() -> None:
    wide = gg.frontend.export(gg.frontend.nn.Linear(400, 3), {"x": ("batch", 400)})
    first, again, other = (surgery.new_head(wide, 200, seed=seed) for seed in (0, 0, 1))
    weights = [onnx.numpy_helper.to_array(next(t for t in m.graph.initializer if t.name == "head.weight"))
               for m in (first, again, other)]  # fmt: skip
    np.testing.assert_array_equal(weights[0], weights[1])
    assert (weights[0] != weights[2]).all()
    assert 0.99 / 20 < np.abs(weights[0]).max() < 1 / 20
    assert abs(weights[0].mean()) < 1e-3


def test_what_else_reads_the_old_weight_keeps_it() -> None:
    made = surgery.new_head(model("a tied embedding"), 7)
    assert {"w", "head.weight"} == {t.name for t in made.graph.initializer}


def test_quantised_weights_and_ranges_are_replaced_by_float() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[batch, 6] x) => (float[batch, 5] y)
      <int8[6, 5] w, float s = {0.1}, int8 z = {0}> {
        f = DequantizeLinear(w, s, z) p = MatMul(x, f) q = QuantizeLinear(p, s, z) y = DequantizeLinear(q, s, z) }"""
    old = parser.parse_model(text)
    data = onnx.numpy_helper.from_array(np.ones((6, 5), np.int8), "w")
    next(t for t in old.graph.initializer if t.name == "w").CopyFrom(data) if any(
        t.name == "w" for t in old.graph.initializer
    ) else old.graph.initializer.append(data)
    made = surgery.new_head(old, 3)
    assert [n.op_type for n in made.graph.node] == ["MatMul"]
    assert run(made, feed("MatMul")).shape == (2, 3)


def test_only_the_head_is_trained(tmp_path: Path) -> None:
    onnx.save(model("MatMul and Add"), tmp_path / "old.onnx")
    step = gg.build(gg.new_head(tmp_path / "old.onnx", 3, out=tmp_path / "new.onnx"), "cross_entropy",
                    gg.optim.adam(0.05), train="head.*")  # fmt: skip
    assert set(step.manifest.trainable) == {"head.weight", "head.bias"}
    history = gg.Trainer(step).fit({"x": feed("Gemm"), "target": np.array([0, 2])}, epochs=30, progress=False)
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    assert run(onnx.load(tmp_path / "new.onnx"), feed("Gemm")).shape == (2, 3)


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ("y = Relu(x)", "the search ended at 'x'"),
        ("p = MatMul(x, w) y = Exp(p)", "the search ended at Exp"),
        ("p = MatMul(x, w) q = Add(p, b) y = Exp(q)", "cut(model, outputs='q')"),
        ("y = Gemm(x, x)", "multiplies two computed tensors"),
        ("p = MatMul(x, w) t = Constant<value_ints=[5, 5]>() y = Reshape(p, t)", "has the size 5 twice"),
        ("p = MatMul(x, w) y = Add(p, m)", "the search ended at Add"),
    ],
)
def test_what_is_no_head(nodes: str, says: str) -> None:
    made = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> g (float[5, 6] x) => (float[5, n] y) {{ {nodes} }}'
    )
    for key, shape in {"w": (6, 5), "m": (5, 5), "b": (5,)}.items():
        made.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), key))
    with pytest.raises(ModelError) as raised:
        surgery.new_head(made, 7)
    assert says in str(raised.value)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="whole number above zero"):
        surgery.new_head(model("Gemm"), 0)
    with pytest.raises(UnknownNameError, match="no value 'logits'"):
        surgery.new_head(model("Gemm"), 3, output="logits")

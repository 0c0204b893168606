"""Weights that an exporter stored once, as they began alike: builds name them, and they become several again."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import ModelError

X = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
MERGED = "--untie-merged"
TWICE = "a = MatMul(x, w) r = Relu(a) y = MatMul(r, w)"


def named(text: str, weights: dict[str, np.ndarray], names: dict[str, str]) -> onnx.ModelProto:
    """A model whose nodes have names by what they compute; ``__`` stands for a dot, which the parser does not take."""
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(w.astype(np.float32), n) for n, w in weights.items())
    for node in model.graph.node:
        node.name = names.get(node.output[0], "")
        for tensors in (node.input, node.output):
            tensors[:] = [n.replace("__", ".") for n in tensors]
    return model


def untrained() -> onnx.ModelProto:
    """Two layers as PyTorch's older exporter writes them: an Identity has the name of a merged bias."""
    rng = np.random.default_rng(0)
    stored = {"first.weight": rng.normal(size=(4, 4)), "second.weight": rng.normal(size=(4, 4)),
              "first.bias": np.zeros(4), "norms.0.weight": np.ones(4)}  # fmt: skip
    return named(
        """g (float[rows, 4] x) => (float[rows, 4] y) {
        second__bias = Identity(first__bias)
        a = Gemm<transB=1>(x, first__weight, first__bias)
        n = LayerNormalization<axis=-1>(a, norms__0__weight, first__bias)
        r = Relu(n) b = Gemm<transB=1>(r, second__weight, second__bias)
        y = LayerNormalization<axis=-1>(b, norms__0__weight) }""",
        stored,
        {"a": "/first/Gemm", "n": "/norms.0/Norm", "b": "/second/Gemm", "y": "/norms.1/Norm"},
    )


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def run(model: onnx.ModelProto) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X})[0]


def test_a_build_names_what_was_merged() -> None:
    (finding,) = gg.build(untrained(), "mse").findings
    assert "'first.bias', 'norms.0.weight' each train as one, though up to 3 modules read them" in str(finding)
    assert MERGED in finding.remedy
    assert not gg.build(surgery.untie_weights(untrained()), "mse").findings
    assert not gg.build(untrained(), "mse", train="*.weight", freeze="norms*").findings


def test_each_module_gets_its_own() -> None:
    model = surgery.untie_weights(untrained())
    onnx.checker.check_model(model, full_check=True)
    biases, scales = {"first.bias", "norms.0.bias", "second.bias"}, {"norms.0.weight", "norms.1.weight"}
    assert set(weights(model)) == biases | scales | {"first.weight", "second.weight"}
    np.testing.assert_array_equal(run(model), run(untrained()))
    trainer = gg.Trainer(gg.build(model, "mse", gg.optim.sgd(0.1)))
    trainer.step({"x": X, "target": X})
    after = trainer.parameters
    assert len({after[n].tobytes() for n in biases}) == 3
    assert len({after[n].tobytes() for n in scales}) == 2


def test_only_the_named_ones() -> None:
    assert set(weights(surgery.untie_weights(untrained(), "norms*"))) - set(weights(untrained())) == {"norms.1.weight"}


def test_copied_layers_are_found_though_their_numbers_differ() -> None:
    """Layers that were copied in an untrained network have random numbers, the same ones."""
    assert gg.build(untrained(), "mse").findings
    model = named(
        "g (float[rows, 4] x) => (float[rows, 4] y) { " + TWICE + " }",
        {"w": np.random.default_rng(0).normal(size=(4, 4))},
        {"a": "/layers.0/MatMul", "y": "/layers.1/MatMul"},
    )
    assert "'w' trains as one, though 2 modules read it" in str(gg.build(model, "mse").findings[0])
    assert set(weights(surgery.untie_weights(model))) == {"w", "layers.1.weight"}


SHARED = {
    "one module, called twice": (TWICE, {"a": "/m/MatMul", "y": "/m/MatMul_1"}),
    "no module is known": (TWICE, {}),
    "a table and the last layer": (
        "i = ArgMax<axis=1, keepdims=0>(x) e = Gather(w, i) t = Transpose<perm=[1, 0]>(w) y = MatMul(e, t)",
        {"e": "/table/Gather", "t": "/head/Transpose", "y": "/head/MatMul"},
    ),
    "a gradient that the model computes": (
        "h = MatMul(x, w) t = Transpose<perm=[1, 0]>(w) g = MatMul(h, t) y = Add(h, g)",
        {"h": "net.0/MatMul", "t": "grad/net.0/MatMul/Transpose", "g": "grad/net.0/MatMul/MatMul_1"},
    ),
    "one table of positions in each layer": (
        "k = MatMul(w, one) q = MatMul(w, two) s = Add(k, q) y = MatMul(x, s)",
        {"k": "/layers.0/key/MatMul", "q": "/layers.1/key/MatMul"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_what_is_shared_on_purpose_is_left(name: str) -> None:
    text, names = SHARED[name]
    rng = np.random.default_rng(0)
    stored = {w: rng.normal(size=(4, 4)) for w in ("w", "one", "two") if w in text}
    model = named(f"g (float[rows, 4] x) => (float[rows, 4] y) {{ {text} }}", stored, names)
    assert not [f for f in gg.build(model, "mse").findings if MERGED in f.remedy]
    with pytest.raises(ModelError, match="nothing to untie"):
        surgery.untie_weights(model)
    if not name.startswith("one module"):  # as is told by name
        assert len(weights(surgery.untie_weights(model, "w"))) == len(stored) + 1


@pytest.mark.parametrize(("second", "merged"), [("l_1", False), ("other", True)])
def test_a_module_that_both_branches_of_an_if_call_is_one(second: str, merged: bool) -> None:
    def branch(name: str, module: str) -> onnx.GraphProto:
        node = onnx.helper.make_node("MatMul", ["x", "l.weight"], [name], name=f"/{module}/MatMul")
        info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["b", 4])
        return onnx.helper.make_graph([node], name, [], [info])

    choice = onnx.helper.make_node("If", ["c"], ["y"], then_branch=branch("t", "l"), else_branch=branch("e", second))
    inputs = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["b", 4]),
              onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])]  # fmt: skip
    outputs = [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["b", 4])]
    weights = [numpy_helper.from_array(np.eye(4, dtype=np.float32), "l.weight")]
    graph = onnx.helper.make_graph([choice], "g", inputs, outputs, weights)
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8, producer_name="pytorch"
    )
    step = gg.build(model)
    assert any("modules read" in str(finding) for finding in step.findings) is merged


def test_a_weight_stays_with_the_module_of_its_name_though_scopes_lack_its_beginning() -> None:
    """As in optimum's files of OPT, whose nodes are called without ``model``."""
    model = named(
        """g (float[rows, 4] x) => (float[rows, 4] y) {
        a = LayerNormalization<axis=-1>(x, model__decoder__final__weight)
        y = LayerNormalization<axis=-1>(a, model__decoder__final__weight) }""",
        {"model.decoder.final.weight": np.ones(4)},
        {"a": "/decoder/layers.0/norm/Norm", "y": "/decoder/final/Norm"},
    )
    found = surgery.untie_weights(model)
    assert [node.input[1] for node in found.graph.node] == [
        "decoder.layers.0.norm.weight",
        "model.decoder.final.weight",
    ]

"""Cutting at inner values, what lies below one, embeddings, tied and fresh weights, weights from files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import safetensors.numpy
from onnx import numpy_helper, parser

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import BuildError, DataError, GradgraphError, ModelError, UnknownNameError

X = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
IDS = np.array([[0, 2, 1], [4, 4, 3]])


def network() -> onnx.ModelProto:
    """Two layers under a head; their weights have the names of PyTorch, or none."""
    model = made(
        """g (float[rows, 4] x, float[rows, 5] unused) => (float[rows, 2] y, float[rows, 5] z) {
        a = Gemm<transB=1>(x, body_weight, body_bias) h = Relu(a) z = Add(h, unused)
        p = MatMul(h, val_92) y = Add(p, top_bias) }""",
        {"body_weight": (5, 4), "body_bias": (5,), "val_92": (5, 2), "top_bias": (2,)},
    )
    next(n for n in model.graph.node if n.op_type == "MatMul").name = "/top/proj/MatMul"
    return model


def language_model() -> onnx.ModelProto:
    return made(
        """g (int64[batch, time] x) => (float[batch, time, 5] y) {
        e = Gather(words, x) n = LayerNormalization<axis=-1>(e, norm_weight, norm_bias)
        t = Transpose<perm=[1, 0]>(words) y = MatMul(n, t) }""",
        {"words": (5, 4), "norm_weight": (4,), "norm_bias": (4,)},
    )


def made(text: str, weights: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    rng = np.random.default_rng(0)
    for name, shape in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return model


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


# --- cutting ----------------------------------------------------------------------------------------------------


def test_a_cut_model_gives_its_inner_value() -> None:
    lower = surgery.cut(network(), outputs="h")
    upper = surgery.cut(network(), inputs="h", outputs=["y"])
    assert [[v.name for v in m.graph.input] for m in (lower, upper)] == [["x"], ["h"]]
    assert set(weights(lower)) == {"body_weight", "body_bias"}
    assert set(weights(upper)) == {"val_92", "top_bias"}
    whole = run(network(), x=X, unused=np.zeros((3, 5), np.float32))["y"]
    np.testing.assert_array_equal(run(upper, h=run(lower, x=X)["h"])["y"], whole)
    for model in (lower, upper):
        onnx.checker.check_model(model, full_check=True)


def test_outputs_are_chosen_in_their_order() -> None:
    model = surgery.cut(network(), outputs=["z", "h", "y"])
    assert [y.name for y in model.graph.output] == ["z", "h", "y"]


def test_a_cut_model_is_written_and_trains(tmp_path: Path) -> None:
    surgery.cut(network(), outputs="y", out=tmp_path / "cut.onnx")
    step = gg.build(tmp_path / "cut.onnx", "mse", freeze=surgery.below(tmp_path / "cut.onnx", "h"))
    assert set(step.manifest.trainable) == {"val_92", "top_bias"}


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"outputs": "logits"}, UnknownNameError, "no value 'logits'"),
        ({"outputs": "x"}, ModelError, "'x' is an input or a weight"),
        ({"inputs": "val_92"}, ModelError, "'val_92' is a weight"),
        ({"inputs": "y"}, ModelError, "'y' is both an input and an output of the cut"),
    ],
)
def test_what_cannot_be_cut(given: dict[str, Any], error: type[GradgraphError], says: str) -> None:
    with pytest.raises(error) as raised:
        surgery.cut(network(), **given)
    assert says in str(raised.value)


# --- below ------------------------------------------------------------------------------------------------------


def test_what_lies_below_a_value() -> None:
    assert surgery.below(network(), "h") == ["body_weight", "body_bias"]
    assert surgery.below(network(), "x") == []
    with pytest.raises(UnknownNameError, match="no value 'k'"):
        surgery.below(network(), "k")


def test_what_a_body_reads_lies_below_too() -> None:
    model = made(
        """g (float[rows, 4] x, bool c) => (float[rows, 4] y) {
        y = If(c) <then_branch = t () => (float[rows, 4] a) { a = Mul(x, inner) },
                   else_branch = e () => (float[rows, 4] b) { b = Identity(x) }> }""",
        {"inner": (4,), "other": (4,)},
    )
    assert surgery.below(model, "y") == ["inner"]


def test_build_freezes_what_lies_below() -> None:
    step = gg.build(network(), "mse", freeze_below="h", output="y")
    assert set(step.manifest.trainable) == {"val_92", "top_bias"}
    only = gg.build(network(), "mse", freeze_below=["h"], freeze="top_bias", output="y")
    assert only.manifest.trainable == ("val_92",)
    several = {
        "top": gg.StepOptions("mse", output="y", freeze_below="h"),
        "body": gg.StepOptions("mse", output="y", freeze=["val_92", "top_bias"]),
    }
    parts = gg.build(network(), steps=several).manifest.parts
    assert "val_92" in parts["top"].writes and "body_weight" not in parts["top"].writes
    assert "body_weight" in parts["body"].writes
    with pytest.raises(UnknownNameError, match="no value 'k'"):
        gg.build(network(), "mse", freeze_below="k", output="y")
    with pytest.raises(BuildError, match="'x' in freeze_below does not depend on any weight"):
        gg.build(network(), "mse", freeze_below="x", output="y")


# --- embeddings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 5, 8])
def test_an_embedding_and_its_tied_head_get_other_rows(rows: int) -> None:
    old, new = language_model(), surgery.resize_embedding(language_model(), "words", rows)
    onnx.checker.check_model(new, full_check=True)
    table = weights(new)["words"]
    assert table.shape == (rows, 4)
    kept = min(rows, 5)
    np.testing.assert_array_equal(table[:kept], weights(old)["words"][:kept])
    for row in table[5:]:
        np.testing.assert_allclose(row, weights(old)["words"].mean(0), rtol=1e-6)
    ids = IDS % kept
    assert run(new, x=ids)["y"].shape == (2, 3, rows)
    np.testing.assert_allclose(run(new, x=ids)["y"][..., :kept], run(old, x=ids)["y"][..., :kept], rtol=1e-6)
    assert new.graph.output[0].type.tensor_type.shape.dim[2].dim_value == rows


def test_what_is_no_embedding() -> None:
    for name, says in (("norm_weight", "not a floating-point matrix"), ("x", "not a floating-point matrix")):
        with pytest.raises(ModelError, match=says):
            surgery.resize_embedding(language_model(), name, 7)
    with pytest.raises(ModelError, match="no Gather reads rows"):
        surgery.resize_embedding(network(), "body_weight", 7)


# --- fresh and tied weights -----------------------------------------------------------------------------------------


def test_weights_begin_as_their_layers_do() -> None:
    model = surgery.reset_weights(network(), ["body_*", "val_92", "top_bias"])
    fan_in = {"body_weight": 4, "body_bias": 4, "val_92": 5, "top_bias": 5}
    for name, data in weights(model).items():
        assert (np.abs(data) <= 1 / np.sqrt(fan_in[name])).all(), name
        assert (data != weights(network())[name]).all()
    table = weights(surgery.reset_weights(language_model(), "*"))
    np.testing.assert_array_equal(table["norm_weight"], np.ones(4))
    np.testing.assert_array_equal(table["norm_bias"], np.zeros(4))
    assert 0.3 < table["words"].std() < 2


def test_only_what_is_named_is_reset() -> None:
    after, before = weights(surgery.reset_weights(network(), "val_92")), weights(network())
    assert {n for n in before if (before[n] != after[n]).any()} == {"val_92"}
    with pytest.raises(UnknownNameError, match="no floating-point weight matches 'tail"):
        surgery.reset_weights(network(), "tail.*")


def test_two_weights_become_one() -> None:
    model = made(
        """g (int64[batch, time] x) => (float[batch, time, 5] y) { e = Gather(words, x) y = MatMul(e, head) }""",
        {"words": (5, 4), "head": (4, 5)},
    )
    tied = surgery.tie_weights(model, "head", "words")
    assert set(weights(tied)) == {"words"}
    words = weights(model)["words"]
    np.testing.assert_allclose(run(tied, x=IDS)["y"], words[IDS] @ words.T, rtol=1e-5, atol=1e-6)
    onnx.checker.check_model(tied, full_check=True)
    assert gg.build(tied, "cross_entropy").manifest.trainable == ("words",)


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [("val_92", "body_weight", "cannot be tied"), ("val_92", "x", "two weights"), ("val_92", "val_92", "two weights")],
)
def test_what_cannot_be_tied(a: str, b: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        surgery.tie_weights(network(), a, b)


# --- names and files --------------------------------------------------------------------------------------------------


def test_anonymous_weights_are_called_by_where_they_are_used() -> None:
    model = surgery.name_weights(network())
    assert set(weights(model)) == {"body_weight", "body_bias", "top.proj.weight", "top_bias"}
    feeds = {"x": X, "unused": np.ones((3, 5), np.float32)}
    for name, y in run(model, **feeds).items():
        np.testing.assert_array_equal(y, run(network(), **feeds)[name])


def test_the_exporter_of_pytorch_writes_modules_beside_nodes() -> None:
    given = network()
    node = next(n for n in given.graph.node if n.op_type == "MatMul")
    node.name = "node_MatMul_7"
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layers', 'layers.0', 'linear']")
    assert "layers.0.weight" in weights(surgery.name_weights(given))
    del node.metadata_props[:]
    assert "MatMul_3.weight" in weights(surgery.name_weights(given))


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_weights_come_from_a_file(suffix: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    stored = {n: rng.normal(size=w.shape).astype(np.float32) for n, w in weights(network()).items()}
    stored["top.weight"] = np.ascontiguousarray(stored.pop("val_92").T)  # as nn.Linear has it
    path = tmp_path / f"weights{suffix}"
    if suffix == ".npz":
        np.savez(path, **stored)
    else:
        safetensors.numpy.save_file(stored, path)
    found = weights(surgery.load_weights(network(), path, names={"val_92": "top.weight"}))
    np.testing.assert_array_equal(found.pop("val_92"), stored.pop("top.weight").T)
    for name, data in found.items():
        np.testing.assert_array_equal(data, stored[name])


def test_a_square_matrix_is_not_turned_by_a_guess() -> None:
    model = made("g (float[rows, 3] x) => (float[rows, 3] y) { y = MatMul(x, w) }", {"w": (3, 3)})
    data = np.arange(9, dtype=np.float32).reshape(3, 3)
    with pytest.raises(DataError, match=r"'w' is square, and it is unknown .*turned=True .* or turned=False"):
        surgery.load_weights(model, {"w": data})
    np.testing.assert_array_equal(weights(surgery.load_weights(model, {"w": data}, turned=True))["w"], data.T)


def test_nothing_that_fits_is_an_error_and_a_part_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError, match="4 weights of the model are not in the file"):
        surgery.load_weights(network(), {"other": np.zeros(3)}, strict=False)
    with caplog.at_level(logging.INFO, "gradgraph.surgery"):
        surgery.load_weights(network(), {"body_bias": np.zeros(5), "other": np.zeros(3)}, strict=False)
    assert "loaded 1 of 4 weights; 3 weights of the model are not in the file" in caplog.text
    assert "1 tensor of the file is not in the model (other)" in caplog.text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"body_weight": np.zeros((5, 4), np.float32)}, "3 weights of the model are not in the file (body_bias, "),
        ({"other": np.zeros(3)}, "1 tensor of the file is not in the model (other)"),
    ],
)
def test_names_that_do_not_fit_are_told(given: dict[str, np.ndarray], says: str) -> None:
    with pytest.raises(DataError) as raised:
        surgery.load_weights(network(), given)
    assert says in str(raised.value)


def test_a_wrong_shape_or_type_or_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'body_bias' has shape \[4\] in the file"):
        surgery.load_weights(network(), {"body_bias": np.zeros(4)}, strict=False)
    with pytest.raises(DataError, match=r"has dtype complex128 .* has dtype float32"):
        surgery.load_weights(network(), {"body_bias": np.zeros(5, complex)}, strict=False)
    with pytest.raises(DataError, match="cannot read the weights"):
        surgery.load_weights(network(), tmp_path / "none.safetensors")
    with pytest.raises(UnknownNameError, match="no weight 'body'"):
        surgery.load_weights(network(), {}, names={"body": "b"})

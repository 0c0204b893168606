"""What was computed from a weight when the file was written is found by its numbers, and only that."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

import gradgraph as gg
from gradgraph.cli.describe import Selection, describe
from gradgraph.errors import Finding
from gradgraph.passes.normal.weights.folded import find_copies
from gradgraph.verify.check_gradients import check_gradients
from tests.kit.small_models import model_of, real

MATRIX, VECTOR, OTHER = real(40, 24), real(32, seed=1), real(40, 24, seed=2)
PADDED = np.concatenate([np.zeros((1, 24), np.float32), MATRIX])
KERNEL = real(8, 4, 3, 3, seed=3)
WEIGHTS = {"m": MATRIX, "v": VECTOR, "padded": PADDED, "kernel": KERNEL, "ones": np.ones(64, np.float32)}

COPIES = [
    (MATRIX.copy(), "is {}", "m"),
    (MATRIX.T.copy(), "is the transpose of {}", "m"),
    (PADDED.T.copy(), "is the transpose of {}", "padded"),
    (MATRIX.reshape(2, 20, 24), "is {}", "m"),
    (1 - VECTOR, "is 1 - {}", "v"),
    ((1 - VECTOR).reshape(1, 1, 32), "is 1 - {}", "v"),
    (1 + VECTOR, "is 1 + {}", "v"),
    (VECTOR * np.float32(0.125), "is {} times 0.125", "v"),
    (-VECTOR, "is {} times -1", "v"),
    (MATRIX.T * np.float32(-3), "is the transpose of {} times -3", "m"),
    (-np.exp(VECTOR), "is minus the exponential of {}", "v"),
    (1 / (1 + np.exp(-VECTOR)), "is the sigmoid of {}", "v"),
    (np.concatenate([OTHER, MATRIX]), "contains {} among other numbers", "m"),
    (np.concatenate([MATRIX.T, OTHER.T]), "contains the transpose of {} among other numbers", "m"),
    (np.concatenate([OTHER, MATRIX, OTHER], axis=1), "contains {} among other numbers", "m"),
    (np.concatenate([PADDED.T, real(24, 5)], axis=1), "contains the transpose of {} among other numbers", "padded"),
    (np.concatenate([real(7, seed=4), VECTOR]), "contains {} among other numbers", "v"),
    (np.concatenate([real(3, 4, 3, 3, seed=5), KERNEL]), "contains {} among other numbers", "kernel"),
    (KERNEL * np.float32(2), "is {} times 2", "kernel"),
]
STRANGERS = {
    "zeros": np.zeros((40, 24), np.float32),
    "ones": np.ones(64, np.float32),
    "few": VECTOR[:8].copy(),
    "shuffled": np.random.default_rng(0).permutation(MATRIX.ravel()).reshape(40, 24),
    "squares": VECTOR**2,
    "nearly": MATRIX + np.float32(1e-3) * OTHER,
    "other": OTHER,
    "integers": np.arange(960).reshape(40, 24),
    "scaled rows": MATRIX * real(40, 1, seed=7),
}


def value(name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(np.ascontiguousarray(array), name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)


@pytest.mark.parametrize(("array", "relation", "weight"), COPIES, ids=[f"{c[1]} {c[0].shape}" for c in COPIES])
def test_copies_are_found(array, relation, weight):
    (copy,) = find_copies([value(n, a) for n, a in WEIGHTS.items()], [value("k", array.astype(np.float32))])
    assert (copy.relation, copy.weight.name) == (relation, weight)


def test_strangers_are_none():
    assert not find_copies([value(n, a) for n, a in WEIGHTS.items()], [value(n, a) for n, a in STRANGERS.items()])


def test_each_copy_finds_its_own_among_weights_of_one_shape():
    weights = [value(f"w{i}", real(16, 24, seed=i)) for i in range(100, 200)]
    tensors = [value(f"k{i}", w.const_value.numpy() * 2) for i, w in enumerate(weights)]
    tensors += [value(f"j{i}", np.concatenate([OTHER, w.const_value.numpy()])) for i, w in enumerate(weights)]
    assert [c.weight for c in find_copies(weights, tensors)] == 2 * weights


def rwkv() -> onnx.ModelProto:
    """Tokens, mixed with the ones before by w and 1 - w, which the exporter has computed; a head tied to the table."""
    mix = real(24, seed=8)
    weights = {"emb.weight": MATRIX, "block.mix": mix, "onnx::Mul_9": 1 - mix, "onnx::MatMul_10": MATRIX.T.copy()}
    nodes = [
        helper.make_node("Gather", ["emb.weight", "token"], ["x"]),
        helper.make_node("Gather", ["emb.weight", "before"], ["p"]),
        helper.make_node("Mul", ["x", "block.mix"], ["a"]),
        helper.make_node("Mul", ["p", "onnx::Mul_9"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["s"]),
        helper.make_node("MatMul", ["s", "onnx::MatMul_10"], ["y"]),
    ]
    model = model_of(nodes, {name: np.arange(3) for name in ("token", "before")}, weights=weights)
    model.producer_name = "pytorch"
    return model


APART = "both are trained independently"
REMEDY = "export the model with torch.onnx.export(..., dynamo=False, do_constant_folding=False)"
TOLD = {
    f"tensor 'onnx::Mul_9' is 1 - 'block.mix', and {APART}; {REMEDY}",
    f"tensor 'onnx::MatMul_10' is the transpose of 'emb.weight', and {APART}; {REMEDY}",
}


def test_build_check_and_inspect_say_it(caplog, tmp_path):
    step = gg.build(rwkv(), "mse")
    assert {str(f) for f in step.findings} == TOLD
    assert {r.getMessage() for r in caplog.records} == TOLD
    feeds = {"token": np.arange(3), "before": np.arange(3)}
    assert {str(f) for f in check_gradients(rwkv(), feeds).findings} == TOLD
    onnx.save(rwkv(), tmp_path / "rwkv.onnx")
    facts = describe(tmp_path / "rwkv.onnx", Selection())
    assert {str(Finding(**f)) for f in facts["findings"]} == TOLD
    assert {w["name"]: w["reason"] for w in facts["weights"]} == {
        "emb.weight": "an operand of the node that computes 'b' (Mul)",
        "block.mix": "an operand of the node that computes 'a' (Mul)",
        "onnx::Mul_9": "an operand of the node that computes 'b' (Mul)",
        "onnx::MatMul_10": "a weight of the node that computes 'y' (MatMul)",
    }


def test_what_is_not_trained_will_not_follow(caplog):
    gg.build(rwkv(), "mse", train=["emb.weight"])
    (record,) = caplog.records
    assert "it will not change when 'emb.weight' is trained" in record.getMessage()
    caplog.clear()
    gg.build(rwkv(), "mse", train=["onnx::Mul_9"], freeze=["block.*"])
    assert not [r for r in caplog.records if "emb.weight" in r.getMessage()]


def test_equal_layers_are_no_copies(caplog):
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 24] x) => (float[batch, 24] y) { h = MatMul (x, w1) y = MatMul (h, w2) }""")
    model.graph.initializer.extend(numpy_helper.from_array(real(24, 24), n) for n in ("w1", "w2"))
    gg.build(model, "mse")
    assert not caplog.records

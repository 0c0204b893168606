"""Scores over many classes are computed some rows at a time, to the same losses and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_native import ORT_NATIVE, scores_in_pieces

pytestmark = pytest.mark.usefixtures("by_vectors")

BATCH, TOKENS, WORDS = 2, 11, 13
PIECES = 4  # of 22 rows: 6, 6, 5 and 5


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores_in_pieces, "PIECE", 6 * WORDS)
    monkeypatch.setattr(scores_in_pieces, "LEAST_ROWS", 1)


def network(flat: bool, capped: bool, stored: bool = True, words: int = WORDS, deep: bool = False) -> onnx.ModelProto:
    """Layers "w" and a head over words; scores of [batch, tokens, words], or ``flat`` of [batch · tokens, words].

    A ``deep`` bias has three axes.
    """
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(5, 16)), "scales": np.full((words, 1), 0.1), "bias": rng.normal(size=words)}
    weights["bias"] = weights["bias"].reshape((1, 1, words) if deep else words)
    numbers = rng.integers(-8, 8, (words, 16))
    head = helper.make_node("DequantizeLinear", ["numbers", "scales"], ["head"], axis=1, block_size=16)
    kept = [helper.make_tensor("numbers", TensorProto.INT4, (words, 16), numbers.reshape(-1))]
    if not stored:
        kept, head = [], helper.make_node("Identity", ["numbers"], ["head"])
        weights["numbers"] = numbers * 0.1
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        head,
        helper.make_node("Transpose", ["head"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["h", "turned"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["scores"]),
        helper.make_node("Tanh" if capped else "Identity", ["scores"], ["capped"]),
        helper.make_node("Reshape", ["capped", "sizes"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    sizes = [-1, words] if flat else [-1, TOKENS, words]
    shape = ["rows", words] if flat else ["batch", TOKENS, words]
    kept += [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()]
    kept.append(numpy_helper.from_array(np.array(sizes, np.int64), "sizes"))
    graph = helper.make_graph(nodes, "g", [value("x", TensorProto.FLOAT, ["batch", TOKENS, 5])],
                              [value("y", TensorProto.FLOAT, shape)], kept)  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def data(flat: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    target = rng.integers(0, WORDS, (BATCH, TOKENS))
    target[1, 7:] = -100
    x = rng.normal(size=(BATCH, TOKENS, 5)).astype(np.float32)
    return {"x": x, "target": target.reshape(-1) if flat else target}


PLAIN = {"flat": False, "capped": False}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "of tokens": (PLAIN, {}, True),
    "of rows": ({"flat": True, "capped": False}, {}, True),
    "a cap": ({"flat": False, "capped": True}, {}, True),
    "weights of classes": (PLAIN, {"weight": np.arange(1.0, WORDS + 1)}, True),
    "a head of floats": ({**PLAIN, "stored": False}, {}, False),  # each product would keep a copy
    "smoothed": (PLAIN, {"label_smoothing": 0.1}, False),  # its gradient is written over all rows
    "a bias of three axes": ({**PLAIN, "deep": True}, {}, True),
    "as many rows as words": ({"flat": True, "capped": False, "words": BATCH * TOKENS}, {}, False),  # of the bias, too
    "z loss": (PLAIN, {"z_loss": 1e-2}, False),  # its gradient reads what a row gave
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options, taken = CASES[name]
    loss = gg.losses.cross_entropy(axis=-1, **options)
    weights = ["w", "bias"] if "words" in model else ["w"]
    step = gg.build(network(**model), loss, gg.optim.sgd(0.1), train=weights, metrics="accuracy")
    lowered = for_machine(step.train, ORT_NATIVE, {"batch": BATCH, "rows": BATCH * TOKENS})
    assert sum(node.op_type == "LogSoftmax" for node in lowered.graph.node) == (PIECES if taken else 1)
    found = []
    for piece in (scores_in_pieces.PIECE, 1 << 23):
        monkeypatch.setattr(scores_in_pieces, "PIECE", piece)
        trainer = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(native_kernels=True))
        results = [trainer.step(data(model["flat"])) for _ in range(3)]
        found.append(([float(r["loss"]) for r in results], trainer.state_dict()))
    (losses, state), (whole_losses, whole) = found
    np.testing.assert_allclose(losses, whole_losses, rtol=1e-6)
    for weight in weights:
        np.testing.assert_allclose(state[weight], whole[weight], rtol=1e-5, atol=1e-6)
    assert losses[-1] < losses[0]

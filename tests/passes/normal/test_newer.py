"""Operators newer than opset 21 have gradients, and models that use them train on a runtime that stops at 26."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import gradgraph as gg
from tests.kit.differences import wrong_gradients
from tests.kit.running import Loop
from tests.kit.small_models import assert_same, model_of, normal_form, real, run

X = real(3, 4)
IMAGE = real(1, 2, 4, 6)

NEWER = {
    "RMSNormalization": (23, "RMSNormalization", {"x": X, "s": real(4, seed=1)}, {"epsilon": 0.01}),
    "RMSNormalization over two axes": (23, "RMSNormalization", {"x": IMAGE, "s": real(4, 6, seed=1)}, {"axis": 2}),
    "Swish": (24, "Swish", {"x": X}, {"alpha": 0.7}),
    "SwiGLU": (28, "SwiGLU", {"a": X, "b": real(3, 4, seed=1)}, {"alpha": 1.3}),
    "Mod": (28, "Mod", {"a": X * 3, "b": real(3, 4, seed=1)}, {}),
    "Mod of one sign": (28, "Mod", {"a": X * 3, "b": real(3, 1, seed=1)}, {"fmod": 1}),
    "SpaceToDepth": (28, "SpaceToDepth", {"x": IMAGE}, {"blocksize": 2, "mode": "CRD"}),
    "TensorScatter": (24, "TensorScatter", {"x": real(2, 5, 3), "u": real(2, 2, 3, seed=1), "i": np.array([3, 0])}, {}),
    "TensorScatter, circular": (
        24,
        "TensorScatter",
        {"x": real(2, 5, 3), "u": real(2, 2, 3, seed=1), "i": np.array([4, 1])},
        {"mode": "circular"},
    ),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", NEWER)
def test_gradients_of_newer_operators(case, dynamic):
    opset, op, feeds, attrs = NEWER[case]
    inputs = {n: (a.dtype, [f"{n}{i}" for i in range(a.ndim)]) for n, a in feeds.items()} if dynamic else feeds
    model = model_of([helper.make_node(op, list(feeds), ["y"], **attrs)], inputs, opset=opset)
    wrt = [n for n, a in feeds.items() if a.dtype == np.float32]
    assert wrong_gradients(model, normal_form(model), feeds, wrt) == []


HIDDEN, HEADS, LENGTH = 8, 2, 5


def decoder():
    """One layer of a language model in the words of opset 28."""
    nodes = [
        helper.make_node("Gather", ["words", "ids"], ["x"]),
        helper.make_node("RMSNormalization", ["x", "norm1"], ["n"]),
        *(helper.make_node("MatMul", ["n", f"w{p}"], [p]) for p in "qkv"),
        *(helper.make_node("RotaryEmbedding", [p, "cos", "sin"], [f"{p}r"], num_heads=HEADS) for p in "qk"),
        helper.make_node("Attention", ["qr", "kr", "v"], ["a"], q_num_heads=HEADS, kv_num_heads=HEADS, is_causal=1),
        helper.make_node("Add", ["x", "a"], ["h"]),
        helper.make_node("RMSNormalization", ["h", "norm2"], ["m"]),
        *(helper.make_node("MatMul", ["m", f"w{p}"], [p]) for p in ("gate", "up")),
        helper.make_node("SwiGLU", ["gate", "up"], ["s"]),
        helper.make_node("MatMul", ["s", "wdown"], ["d"]),
        helper.make_node("Add", ["h", "d"], ["o"]),
        helper.make_node("MatMul", ["o", "head"], ["logits"]),
        helper.make_node("Transpose", ["logits"], ["classes"], perm=[0, 2, 1]),
    ]
    weights = {"words": real(11, HIDDEN), "norm1": np.ones(HIDDEN, np.float32), "norm2": np.ones(HIDDEN, np.float32)}
    weights |= {f"w{p}": real(HIDDEN, HIDDEN, seed=i) * 0.3 for i, p in enumerate("qkv")}
    weights |= {f"w{p}": real(HIDDEN, 16, seed=i) * 0.3 for i, p in enumerate(("gate", "up"))}
    weights |= {"wdown": real(16, HIDDEN, seed=3) * 0.3, "head": real(HIDDEN, 11, seed=4) * 0.3}
    angles = np.arange(LENGTH)[:, None] * np.array([1.0, 0.1])
    weights |= {n: np.tile(f(angles), (3, 1, 1)).astype(np.float32) for n, f in (("cos", np.cos), ("sin", np.sin))}
    return model_of(nodes, {"ids": (np.int64, [3, LENGTH])}, ["classes"], 28, weights)


def test_a_model_of_opset_28_trains():
    model = decoder()
    ids = np.random.default_rng(0).integers(0, 11, (3, LENGTH))
    assert_same(ReferenceEvaluator(model).run(None, {"ids": ids}), run(normal_form(model), {"ids": ids}), atol=1e-5)
    loop = Loop(gg.build(model, loss="cross_entropy", optimizer="adamw", freeze=["cos", "sin"]))
    losses = [float(loop({"ids": ids, "target": np.roll(ids, -1, 1)}, learning_rate=0.01)["loss"]) for _ in range(40)]
    assert losses[-1] < 0.3 * losses[0]

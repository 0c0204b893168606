"""Attention and its relatives of opsets 23 to 28, written at opset 21: values, and gradients by differences."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import gradgraph as gg
from gradgraph.errors import ModelError
from gradgraph.passes.normal import normalise
from tests.kit.differences import wrong_gradients
from tests.kit.small_models import assert_same, model_of, normal_form, op_types, real, run

B, H, KV, S, T, D, DV = 2, 4, 2, 3, 5, 4, 6


def qkv(heads=H, kv=H, queries=S, keys=T, packed=False):
    shapes = {"q": (heads, queries, D), "k": (kv, keys, D), "v": (kv, keys, DV)}
    feeds = {n: real(B, *shape, seed=i) for i, (n, shape) in enumerate(shapes.items())}
    if packed:
        feeds = {n: a.transpose(0, 2, 1, 3).reshape(B, a.shape[2], -1) for n, a in feeds.items()}
    return feeds


def hidden(*shape, rows=(), seed=9):
    """A boolean mask in which every query sees some keys, but for ``rows``."""
    mask = np.random.default_rng(seed).random(shape) < 0.6
    mask[..., 0] = True
    mask[..., list(rows), :] = False
    return mask


def as_bias(mask):
    return np.where(mask, np.float32(0.3), np.float32(-np.inf)).astype(np.float32)


PAST = {"pk": real(B, KV, 2, D, seed=7), "pv": real(B, KV, 2, DV, seed=8)}
CACHED = {"m": None, "pk": None, "pv": None, "n": np.array([4, 2])}
HEADS = {"q_num_heads": H, "kv_num_heads": KV}
ABSENT = {"m": None}

ATTENTION = {
    "plain": (23, qkv(), {}),
    "scaled, soft cap": (23, qkv(), {"scale": 0.7, "softcap": 1.5}),
    "grouped": (23, qkv(kv=KV), {}),
    "one key head": (24, qkv(kv=1), {}),
    "packed": (23, qkv(packed=True), {"q_num_heads": H, "kv_num_heads": H}),
    "packed, grouped": (24, qkv(kv=KV, packed=True), HEADS),
    "causal": (23, qkv(queries=T), {"is_causal": 1}),
    "causal, fewer queries": (25, qkv(), {"is_causal": 1}),
    "causal, more queries": (25, qkv(queries=T, keys=S), {"is_causal": 1}),
    "boolean mask": (23, qkv() | {"m": hidden(S, T)}, {}),
    "boolean mask per batch": (24, qkv() | {"m": hidden(B, 1, S, T)}, {}),
    "boolean mask of keys": (24, qkv() | {"m": hidden(B, 1, 1, T)}, {}),
    "boolean mask, a hidden row": (24, qkv() | {"m": hidden(S, T, rows=[1])}, {}),
    "boolean mask, a hidden row, grouped": (24, qkv(kv=KV) | {"m": hidden(B, H, S, T, rows=[1])}, {}),
    "bias": (23, qkv() | {"m": real(B, 1, S, T, seed=4)}, {}),
    "bias per head, grouped": (23, qkv(kv=KV) | {"m": real(H, S, T, seed=4)}, {}),
    "bias hides": (24, qkv() | {"m": as_bias(hidden(S, T))}, {}),
    "bias hides a row": (24, qkv() | {"m": as_bias(hidden(S, T, rows=[0, 2]))}, {}),
    "mask and causal": (24, qkv(queries=T) | {"m": hidden(T, T, seed=3)}, {"is_causal": 1}),
    "bias and causal": (24, qkv(queries=T) | {"m": real(T, T, seed=4)}, {"is_causal": 1, "softcap": 2.0}),
    "short mask": (24, qkv() | {"m": hidden(S, 3)}, {}),
    "short bias": (25, qkv() | {"m": real(B, 1, S, 4)}, {}),
    "past": (23, qkv(kv=KV) | ABSENT | PAST, {"is_causal": 1}),
    "past, packed, mask": (24, qkv(kv=KV, packed=True) | {"m": hidden(S, T + 2)} | PAST, HEADS),
    "cache": (24, qkv(kv=KV) | CACHED, {}),
    "cache, causal": (25, qkv(kv=KV) | CACHED, {"is_causal": 1}),
    "cache, short mask": (25, qkv() | CACHED | {"m": hidden(B, 1, S, 4)}, {}),
    "window": (25, qkv(queries=T), {"left_window_size": 1, "right_window_size": 2}),
    "window left, more queries": (25, qkv(queries=T, keys=S), {"left_window_size": 1}),
    "window right": (25, qkv(), {"right_window_size": 1}),
    "window, past": (25, qkv(kv=KV) | ABSENT | PAST, {"left_window_size": 2, "is_causal": 1}),
    "window, cache": (25, qkv(kv=KV) | CACHED, {"left_window_size": 1, "right_window_size": 0}),
    "precise softmax": (24, qkv(), {"softmax_precision": 11}),
}


def at_21(model, dynamic):
    """The normal form. Names that shape inference makes up may differ the second time, so open shapes are run once."""
    return ir.to_proto(normalise(ir.from_proto(model))) if dynamic else normal_form(model)


def attention_model(opset, feeds, attrs, dynamic=False, outputs=("y",)):
    given = {n: a for n, a in feeds.items() if a is not None}
    inputs = {n: (a.dtype, [f"{n}{i}" for i in range(a.ndim)]) for n, a in given.items()} if dynamic else given
    names = [n if a is not None else "" for n, a in feeds.items()]
    node = helper.make_node("Attention", names, list(outputs), name="attention", **attrs)
    return model_of([node], inputs, [o for o in outputs if o], opset), given


@pytest.mark.sweep(0.14)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_at_21_is_attention(case, dynamic):
    opset, feeds, attrs = ATTENTION[case]
    outputs = ["y", "present_k", "present_v"] if "pk" in feeds and feeds["pk"] is not None else ["y"]
    model, given = attention_model(opset, feeds, attrs, dynamic, outputs)
    found = at_21(model, dynamic)
    assert_same(ReferenceEvaluator(model).run(None, given), run(found, given), atol=2e-6)
    assert wrong_gradients(model, found, given, [n for n, a in given.items() if n not in ("m", "n")]) == []


@pytest.mark.parametrize("case", ["bias", "bias per head, grouped", "bias and causal", "short bias"])
def test_a_bias_has_a_gradient(case):
    opset, feeds, attrs = ATTENTION[case]
    model, given = attention_model(opset, feeds, attrs)
    assert wrong_gradients(model, normal_form(model), given, ["m"]) == []


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("case", ["plain", "grouped", "mask and causal", "bias hides a row", "bias and causal"])
def test_attention_shows_the_scores_of_each_stage(case, mode):
    opset, feeds, attrs = ATTENTION[case]
    model, given = attention_model(opset, feeds, attrs | {"qk_matmul_output_mode": mode}, outputs=["y", "", "", "qk"])
    y, scores = run(normal_form(model), given)
    expected_y, expected = ReferenceEvaluator(model).run(None, given)
    if mode == 0 and "softcap" in attrs:  # the specification wants raw scores; the reference caps them
        expected = given["q"] @ given["k"].swapaxes(2, 3) / 2
    assert_same([expected_y, expected], [y, scores], atol=2e-6)


def test_a_row_that_sees_nothing_gives_zeros_and_no_gradient():
    opset, feeds, attrs = ATTENTION["boolean mask, a hidden row"]
    model, given = attention_model(opset, feeds, attrs)
    gradient = gg.vjp(model, wrt=["q", "k", "v"])
    y, dq, dk, dv = run(gradient, given | {"y.cotangent": np.ones((B, H, S, DV), np.float32)})
    assert (y[:, :, 1] == 0).all()
    assert (dq[:, :, 1] == 0).all()
    assert np.isfinite(dk).all()
    assert np.isfinite(dv).all()


def test_plain_attention_is_no_more_than_its_formula():
    model, _ = attention_model(23, qkv(), {})
    assert op_types(normal_form(model)) == ["Mul", "Transpose", "MatMul", "Softmax", "MatMul"]


def test_heads_must_be_told():
    model, _ = attention_model(23, qkv(packed=True), {})
    with pytest.raises(ModelError, match=r"'attention'.*no number of heads"):
        normal_form(model)


# --- rotary embeddings -----------------------------------------------------------------------------------


ANGLES = {"cos": real(8, 2, seed=1), "sin": real(8, 2, seed=2)}
BY_PLACE = {"cos": real(B, S, 2, seed=1), "sin": real(B, S, 2, seed=2)}
PLACES = {"i": np.array([[0, 3, 7], [2, 2, 1]])}

ROTARY = {
    "halves": ({"x": real(B, H, S, 4)} | ANGLES | PLACES, {}),
    "neighbours": ({"x": real(B, H, S, 4)} | ANGLES | PLACES, {"interleaved": 1}),
    "packed": ({"x": real(B, S, H * 4)} | ANGLES | PLACES, {"num_heads": H}),
    "packed neighbours": ({"x": real(B, S, H * 4)} | BY_PLACE, {"num_heads": H, "interleaved": 1}),
    "without positions": ({"x": real(B, H, S, 4)} | BY_PLACE, {}),
    "part": ({"x": real(B, H, S, 7)} | ANGLES | PLACES, {"rotary_embedding_dim": 4}),
    "part, packed, neighbours": (
        {"x": real(B, S, H * 6)} | BY_PLACE,
        {"rotary_embedding_dim": 4, "num_heads": H, "interleaved": 1},
    ),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", ROTARY)
def test_rotary_embedding(case, dynamic):
    feeds, attrs = ROTARY[case]
    check("RotaryEmbedding", 23, feeds, attrs, dynamic, wrt=["x", "cos", "sin"])


def check(op, opset, feeds, attrs, dynamic, wrt, outputs=("y",), **tolerance):
    """One node: the normal form gives what the reference gives, and its gradients are right."""
    given = {n: a for n, a in feeds.items() if a is not None}
    inputs = {n: (a.dtype, [f"{n}{i}" for i in range(a.ndim)]) for n, a in given.items()} if dynamic else given
    node = helper.make_node(op, [n if a is not None else "" for n, a in feeds.items()], list(outputs), **attrs)
    model = model_of([node], inputs, list(outputs), opset)
    found = at_21(model, dynamic)
    assert_same(ReferenceEvaluator(model).run(None, given), run(found, given), **{"atol": 2e-6, **tolerance})
    assert wrong_gradients(model, found, given, wrt) == []


# --- with a state ------------------------------------------------------------------------------------------


CONV = {
    "plain": ({"x": real(B, 3, 5), "w": real(3, 1, 3, seed=1)}, {}),
    "bias, silu": ({"x": real(B, 3, 5), "w": real(3, 1, 3, seed=1), "b": real(3, seed=2)}, {"activation": "silu"}),
    "past": ({"x": real(B, 3, 2), "w": real(3, 1, 4, seed=1), "b": None, "past": real(B, 3, 3, seed=3)}, {}),
    "short": ({"x": real(B, 3, 1), "w": real(3, 1, 4, seed=1)}, {"activation": "swish"}),
    "kernel of one": ({"x": real(B, 3, 4), "w": real(3, 1, 1, seed=1)}, {}),
}


@pytest.mark.parametrize("outputs", [["y"], ["y", "state"]], ids=["y", "y and state"])
@pytest.mark.parametrize("case", CONV)
def test_causal_convolution_with_a_state(case, outputs):
    feeds, attrs = CONV[case]
    wrt = [n for n, a in feeds.items() if a is not None]
    check("CausalConvWithState", 27, feeds, attrs, False, wrt, outputs)


HV, DK = 2, 3  # heads of keys and values; size of a key
PACKED = {"q": real(B, 4, 4 * DK), "k": real(B, 4, HV * DK, seed=1), "v": real(B, 4, HV * DV, seed=2)}
PAST_STATE = {"past": real(B, HV, DK, DV, seed=3)}
DECAY = -np.abs(real(B, 4, HV * DK, seed=4))
BETA = {"beta": np.abs(real(B, 4, HV, seed=5))}
NO_PAST, NO_DECAY = {"past": None}, {"decay": None}

LINEAR = {
    "linear": (PACKED, {"update_rule": "linear"}),
    "linear, past": (PACKED | PAST_STATE, {"update_rule": "linear", "scale": 0.3}),
    "gated per key": (PACKED | PAST_STATE | {"decay": DECAY}, {"update_rule": "gated"}),
    "gated per head": (PACKED | NO_PAST | {"decay": DECAY[..., :HV]}, {"update_rule": "gated"}),
    "delta": (PACKED | NO_PAST | NO_DECAY | BETA, {"update_rule": "delta"}),
    "delta, one rate": (
        PACKED | NO_PAST | NO_DECAY | {"beta": BETA["beta"][..., :1]},
        {"update_rule": "delta", "scale": 1.0},
    ),
    "gated delta": (PACKED | PAST_STATE | {"decay": DECAY} | BETA, {}),
}


@pytest.mark.sweep(0.48)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", LINEAR)
def test_linear_attention(case, dynamic):
    feeds, attrs = LINEAR[case]
    wrt = [n for n, a in feeds.items() if a is not None]
    heads = {"q_num_heads": 4, "kv_num_heads": HV}
    check("LinearAttention", 27, feeds, attrs | heads, dynamic, wrt, ("y", "state"), atol=1e-5)


# --- what its gradient costs -----------------------------------------------------------------------------------


def test_the_gradient_sums_over_heads_rather_than_keys():
    """Σ dP·P along the keys is Σ dO·O along the head: no third product as large as the scores."""
    model, _ = attention_model(23, qkv(queries=T, keys=9), {})
    nodes = gg.vjp(model, wrt=["q", "k", "v"]).graph.node
    summed = [n.input[0] for n in nodes if n.op_type == "ReduceSum"]
    assert [set(n.input) for n in nodes if n.output[0] in summed] == [{"y", "y.cotangent"}]


def test_the_gradient_is_right_in_onnxruntime():
    feeds = qkv(kv=KV) | {"m": hidden(S, T, rows=[1])}
    model, given = attention_model(24, feeds, {"softcap": 1.5})
    gradient, seed = gg.vjp(model, wrt=["q", "k", "v"]), {"y.cotangent": real(B, H, S, DV, seed=5)}
    assert_same(ReferenceEvaluator(gradient).run(None, given | seed), run(gradient, given | seed), atol=1e-5)

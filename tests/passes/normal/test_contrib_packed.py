"""Packed batches of com.microsoft: each sequence gets what onnxruntime's kernels compute for it alone.

onnxruntime has no CPU kernels of these operators, but of their counterparts for a single sequence.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gradgraph.errors import ModelError
from tests.kit.differences import wrong_gradients
from tests.kit.small_models import assert_same, normal_form, real, run
from tests.passes.normal.test_contrib import fused, smooth

LENGTHS = [3, 1, 4]
ENDS = np.cumsum([0, *LENGTHS]).astype(np.int32)
TOKENS, LONGEST, B = sum(LENGTHS), max(LENGTHS) + 1, len(LENGTHS)
HEADS, SIZE = 2, 4
HIDDEN = HEADS * SIZE


def offsets():
    """The positions of the tokens among those of a padded batch, and then of the padding."""
    places = np.arange(B * LONGEST).reshape(B, LONGEST)
    kept = np.arange(LONGEST) < np.array(LENGTHS)[:, None]
    return np.concatenate([places[kept], places[~kept]]).reshape(B, LONGEST).astype(np.int32)


def check(op, feeds, attrs, expected, outputs=("y",), dynamic=False, **tolerance):
    model, given = fused(op, feeds, attrs, outputs, dynamic)
    found = normal_form(model)
    assert {o.domain for o in found.opset_import} == {""}
    assert_same(expected, run(found, given), **{"atol": 1e-5, "rtol": 1e-4, **tolerance})
    assert wrong_gradients(model, found, given, smooth(given)) == []


BIASES = {
    "none": None,
    "of all": real(1, 1, LONGEST, LONGEST, seed=8),
    "of each": real(B, HEADS, LONGEST, LONGEST, seed=8),
}


def added(bias, i, length):
    """The bias of sequence ``i``, as its own attention gets it."""
    return None if bias is None else bias[i if len(bias) > 1 else 0][None, :, :length, :length].copy()


@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize("bias", BIASES)
def test_packed_attention(bias, scale):
    attrs = {"num_heads": HEADS} | ({"scale": scale} if scale else {})
    feeds = {"x": real(TOKENS, 5), "w": real(5, 2 * HIDDEN + 6, seed=1), "b": real(2 * HIDDEN + 6, seed=2)}
    attrs["qkv_hidden_sizes"] = [HIDDEN, HIDDEN, 6]
    rows = []
    for i, (begin, end) in enumerate(itertools.pairwise(ENDS)):
        own = feeds | {
            "x": feeds["x"][None, begin:end],
            "m": None,
            "past": None,
            "a": added(BIASES[bias], i, end - begin),
        }
        rows.append(run(*fused("Attention", own, attrs))[0][0])
    feeds |= {"o": offsets(), "c": ENDS, "a": BIASES[bias]}
    check("PackedAttention", feeds, attrs, [np.concatenate(rows)])


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("form", ["apart", "bias", "in one"])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_packed_multi_head_attention(bias, form, dynamic):
    parts = {n: real(TOKENS, HIDDEN, seed=i) for i, n in enumerate("qkv")}
    own_bias = real(3 * HIDDEN, seed=4) if form == "bias" else None
    rows = []
    for i, (begin, end) in enumerate(itertools.pairwise(ENDS)):
        own = {n: x[None, begin:end] for n, x in parts.items()} | {"b": own_bias, "m": None}
        own["a"] = added(BIASES[bias], i, end - begin)
        rows.append(run(*fused("MultiHeadAttention", own, {"num_heads": HEADS}))[0][0])
    feeds = parts
    if form == "in one":
        feeds = {"q": np.stack([x.reshape(TOKENS, HEADS, SIZE) for x in parts.values()], 2), "k": None, "v": None}
    feeds = feeds | {"b": own_bias, "o": offsets(), "c": ENDS, "a": BIASES[bias]}
    check("PackedMultiHeadAttention", feeds, {"num_heads": HEADS}, [np.concatenate(rows)], dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_padding_is_removed_and_restored(dynamic):
    x = real(B, LONGEST, 2)
    kept = np.arange(LONGEST) < np.array(LENGTHS)[:, None]
    expected = [x[kept], offsets(), ENDS, np.array([max(LENGTHS)], np.int32)]
    check("RemovePadding", {"x": x, "n": np.array(LENGTHS, np.int32)}, {}, expected, ["y", "o", "c", "m"], dynamic)
    check("RestorePadding", {"x": x[kept], "o": offsets()}, {}, [x * kept[:, :, None]], dynamic=dynamic)


CHANNELS = 3


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_causal_convolution(bias, activation, dilation):
    x, w, b = real(TOKENS, CHANNELS), real(CHANNELS, 1, 3, seed=1), real(CHANNELS, seed=2) if bias else None
    state = real(B, CHANNELS, 2 * dilation, seed=3)
    attrs = {"activation": activation, "dilation": dilation}
    rows, states = [], []
    for i, (begin, end) in enumerate(itertools.pairwise(ENDS)):
        own = {"x": x[None, begin:end].transpose(0, 2, 1).copy(), "w": w, "b": b, "s": state[i : i + 1]}
        y, last = run(*fused("CausalConvWithState", own, attrs, ["y", "last"]))
        rows.append(y[0].T)
        states.append(last)
    feeds = {"x": x, "w": w, "c": ENDS, "b": b, "s": state}
    expected = [np.concatenate(rows), np.concatenate(states)]
    check("VarlenCausalConvWithState", feeds, attrs, expected, ["y", "last"])


def normalised(x):
    return (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)).astype(np.float32)


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("few", [4, 2])
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize(("state", "activated"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("scale", [0.0, 0.7])
def test_gated_delta_net(rule, few, by_key, state, activated, scale):
    many, d, m = 4, 3, 2
    q, k = (normalised(real(TOKENS, few, d, seed=i)) for i in range(2))
    v, beta = real(TOKENS, many, m, seed=2), real(TOKENS, many, seed=3) / 4
    decay = real(TOKENS, many, *[d] * by_key, seed=4)
    a_log, bias = real(many, seed=5) / 4, real(many, seed=6)
    first = real(B, many, m, d, seed=7) if state else None
    used = activated and not by_key
    g = -np.exp(a_log) * np.log1p(np.exp(decay + bias)) if used else -np.abs(decay)
    rate = 1 / (1 + np.exp(-beta)) if activated else np.abs(beta)
    rows, states = [], []
    for i, (begin, end) in enumerate(itertools.pairwise(ENDS)):
        own = {n: np.repeat(x[begin:end], many // few, 1).reshape(1, end - begin, -1) for n, x in (("q", q), ("k", k))}
        own |= {"v": v[begin:end].reshape(1, end - begin, -1)}
        own["s"] = first[i : i + 1].transpose(0, 1, 3, 2).copy() if state else None
        own["d"] = g[begin:end].reshape(1, end - begin, -1).astype(np.float32) if "gated" in rule else None
        own["b"] = rate[None, begin:end].astype(np.float32) if "delta" in rule else None
        attrs = {"q_num_heads": many, "kv_num_heads": many, "update_rule": rule, "scale": scale}
        y, last = run(*fused("LinearAttention", own, attrs, ["y", "last"]))
        rows.append(y.reshape(end - begin, many, m))
        states.append(last.transpose(0, 1, 3, 2))
    feeds = {"q": q, "k": k, "v": v, "c": ENDS}
    feeds["d"] = (decay if used else -np.abs(decay)) if "gated" in rule else None
    feeds["b"] = (beta if activated else np.abs(beta)) if "delta" in rule else None
    feeds |= {
        "s": first,
        "al": a_log if used and "gated" in rule else None,
        "db": bias if used and "gated" in rule else None,
    }
    attrs = {"update_rule": rule, "scale": scale, "beta_activation": "sigmoid" if activated else "none"}
    attrs["gate_activation"] = "qwen" if used else "none"
    expected = [np.concatenate(rows), np.concatenate(states)]
    check("GatedDeltaNet", feeds, attrs, expected, ["y", "last"], rtol=1e-3)


@pytest.mark.parametrize("rank", [3, 4])
def test_a_gated_delta_net_of_equal_lengths(rank):
    """[batch, length, heads, size], or packed with the batch size of the state; with norms of queries and keys."""
    length, heads, d, m = 3, 2, 3, 2
    q, k, v = (real(2, length, heads, n, seed=i) for i, n in enumerate((d, d, m)))
    state, decay = real(2, heads, m, d, seed=3), -np.abs(real(2, length, heads, seed=4))
    beta = np.abs(real(2, length, heads, seed=5)) / 4
    own = {"q": normalised(q), "k": normalised(k), "v": v}
    own = {n: x.reshape(2, length, -1) for n, x in own.items()}
    own |= {"s": state.transpose(0, 1, 3, 2).copy(), "d": decay, "b": beta}
    y, last = run(*fused("LinearAttention", own, {"q_num_heads": heads, "kv_num_heads": heads}, ["y", "last"]))
    expected = [y.reshape(v.shape), last.transpose(0, 1, 3, 2)]
    feeds = {"q": q, "k": k, "v": v, "c": None, "d": decay, "b": beta}
    if rank == 3:
        feeds = {n: None if x is None else x.reshape(-1, *x.shape[2:]) for n, x in feeds.items()}
        expected[0] = expected[0].reshape(-1, heads, m)
    check("GatedDeltaNet", feeds | {"s": state}, {"qk_l2_norm": 1}, expected, ["y", "last"])


QKV = {n: real(TOKENS, 2, 3) for n in "qkv"}
REFUSED = {
    "'fused'.*returns the updates of its state": (
        "VarlenCausalConvWithState",
        {"x": real(TOKENS, 3), "w": real(3, 1, 2), "c": ENDS, "b": None, "s": real(B, 3, 1), "n": ENDS[1:]},
        {"state_update_capacity": 2},
        ["y", "last", "u"],
    ),
    "'fused'.*packed projections": ("GatedDeltaNet", {"q": real(TOKENS, 6)}, {}, ["y"]),
    "'fused'.*neither the lengths": ("GatedDeltaNet", QKV, {"update_rule": "linear"}, ["y"]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_option_without_a_form_is_named(message):
    model, _ = fused(*REFUSED[message])
    with pytest.raises(ModelError, match=message):
        normal_form(model)

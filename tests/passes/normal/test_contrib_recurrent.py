"""Recurrent layers of hybrid language models in com.microsoft: onnxruntime computes the same with and without them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.errors import GradgraphError
from tests.kit.small_models import real
from tests.passes.normal.test_contrib import check, fused, smooth

B, T = 2, 5
CONV_ATTRIBUTES = list(itertools.product(["none", "silu", "swish"], [1, 2], [False, True], [False, True]))


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("layout", ["channels first", "channels last", "two axes of channels"])
@pytest.mark.parametrize(("activation", "dilation", "bias", "past"), CONV_ATTRIBUTES)
def test_causal_convolution(activation, dilation, bias, past, layout):
    x, state = real(B, 6, T), real(B, 6, 2 * dilation, seed=3)
    if layout != "channels first":
        axes = (6,) if layout == "channels last" else (2, 3)
        x, state = (a.transpose(0, 2, 1).reshape(B, -1, *axes) for a in (x, state))
    feeds = {"x": x, "w": real(6, 1, 3, seed=1), "b": real(6, seed=2) if bias else None}
    feeds["p"] = state if past else None
    attrs = {"activation": activation, "dilation": dilation, "channels_last": int(layout != "channels first")}
    check(*fused("CausalConvWithState", feeds, attrs, ["y", "present"]))


HEADS = [(2, 2, 2), (4, 2, 2), (2, 4, 4), (2, 2, 4)]  # of queries, keys and values


@pytest.mark.sweep(0.07)
@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("by_key", "beta_of_each", "past"), list(itertools.product([False, True], repeat=3)))
def test_linear_attention(rule, heads, by_key, beta_of_each, past):
    (hq, h_of_keys, hk), d, m = heads, 4, 3
    feeds = {"q": real(B, T, hq * d), "k": 0.5 * real(B, T, h_of_keys * d, seed=1), "v": real(B, T, hk * m, seed=2)}
    feeds["s"] = real(B, hk, d, m, seed=3) if past else None
    feeds["d"] = -abs(real(B, T, hk * d if by_key else hk, seed=4)) if "gated" in rule else None
    feeds["b"] = abs(real(B, T, hk if beta_of_each else 1, seed=5)) / 4 if "delta" in rule else None
    attrs = {"q_num_heads": hq, "kv_num_heads": hk, "update_rule": rule, "scale": 0.7 if by_key else 0.0}
    check(*fused("LinearAttention", feeds, attrs, ["y", "present"]), rtol=1e-3)


@pytest.mark.parametrize("beta", [False, True])
def test_gate_of_linear_attention(beta):
    feeds = {"a": real(B, T, 3), "t": real(3, seed=1), "s": real(3, seed=2), "b": real(B, T, 3, seed=3)}
    check(*fused("LinearAttentionGate", feeds if beta else feeds | {"b": None}, {}, ["decay", "beta"][: 1 + beta]))


@pytest.mark.parametrize("size", [8, 4, 1])
@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_gated_rms_norm(size, activation):
    feeds = {"x": real(B, 3, 8), "s": real(size, seed=1), "g": real(B, 3, 8, seed=2)}
    check(*fused("GatedRMSNorm", feeds, {"activation": activation, "epsilon": 0.01}))


def test_gated_add():
    check(*fused("GatedAdd", {"x": real(B, 3, 8), "z": real(B, 3, 8, seed=1), "g": real(B, 3, 1, seed=2)}, {}))


SECTIONS = [[4, 0, 0], [2, 1, 1], [1, 1, 2], [0, 2, 2], [1, 2, 1]]


@pytest.mark.sweep(0.15)
@pytest.mark.parametrize("sections", SECTIONS, ids=str)
@pytest.mark.parametrize(("layout", "interleaved", "rank"), list(itertools.product([0, 1], [0, 1], [3, 4])))
@pytest.mark.parametrize("size", [8, 12], ids=lambda size: f"heads of {size}")
def test_multimodal_rotary_embedding(sections, layout, interleaved, rank, size):
    x = real(B, 2, T, size)
    x = x if rank == 4 else x.transpose(0, 2, 1, 3).reshape(B, T, -1)
    positions = np.random.default_rng(0).integers(0, 9, (3, B, T))
    feeds = {"x": x, "p": positions, "c": real(9, 4, seed=1), "s": real(9, 4, seed=2)}
    attrs = {
        "mrope_section": sections,
        "mrope_layout": layout,
        "interleaved": interleaved,
        "num_heads": 2,
        "scale": 2.0,
    }
    check(*fused("MRotaryEmbedding", feeds, attrs | ({"rotary_embedding_dim": 8} if size != 8 else {})))


@pytest.mark.parametrize(
    ("op", "feeds", "attrs", "outputs"),
    [
        ("CausalConvWithState", {"x": real(1, 2, 4, 5), "w": real(2, 1, 3, 3)}, {"ndim": 2}, ["y", "p"]),
        ("CausalConvWithState", {"x": real(1, 2, 5), "w": real(2, 1, 3)}, {"state_window": 2}, ["y", "p"]),
    ],
    ids=["two axes", "a window of states"],
)
def test_what_has_no_form_is_refused(op, feeds, attrs, outputs):
    model, given = fused(op, feeds, attrs, outputs)
    with pytest.raises(GradgraphError, match="use the original model"):
        gg.vjp(model, wrt=smooth(given))

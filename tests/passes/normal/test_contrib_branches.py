"""Operators of com.microsoft for parallel streams: onnxruntime's kernels compute the same as their standard forms."""

from __future__ import annotations

import numpy as np
import pytest

from gradgraph.errors import ModelError
from tests.kit.differences import wrong_gradients
from tests.kit.small_models import assert_same, normal_form, real, run
from tests.passes.normal.test_contrib import check, fused

B, T, C, H = 2, 3, 4, 6
STREAMS = real(B, T, C, H)
FLAT = STREAMS.reshape(B, T, C * H)
GATES = {"of each branch": (C,), "of each branch, [1]": (C, 1), "of each number": (C, H)}


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("scale", [None, (H,), (C, H), (C * H,)], ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_branchwise_rms_norm(flat, scale, dynamic):
    if dynamic and scale is not None and len(scale) == 1:
        pytest.skip("a vector of unknown size may belong to one branch or to all; it is refused, see below")
    feeds = {"x": FLAT if flat else STREAMS, "s": None if scale is None else real(*scale, seed=1)}
    attrs = {"epsilon": 0.01} | ({"num_branches": C} if flat else {})
    check(*fused("BranchwiseRMSNorm", feeds, attrs, dynamic=dynamic))


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_streams_are_reduced(gates, flat, scale):
    feeds = {"x": FLAT if flat else STREAMS, "g": real(B, T, *GATES[gates], seed=1)}
    attrs = {"reduction_scale": scale} | ({"num_branches": C} if flat else {})
    check(*fused("HyperConnectionPreMix", feeds, attrs))


def test_flat_gates_of_flat_streams():
    check(*fused("HyperConnectionPreMix", {"x": FLAT, "g": real(B, T, C * H, seed=1)}, {"num_branches": C}))


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("flat", [False, True])
def test_streams_are_mixed(gates, flat, mixed):
    feeds = {"x": FLAT if flat else STREAMS, "b": real(B, T, H, seed=1), "g": real(B, T, *GATES[gates], seed=2)}
    feeds["m"] = real(B, T, C, C, seed=3) if mixed else None
    check(*fused("HyperConnectionPostMix", feeds, {"num_branches": C} if flat else {}))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("outputs", [["y"], ["y", "normed"]], ids=len)
def test_engram_gate(outputs, dynamic):
    feeds = {"k": STREAMS, "q": real(B, T, C, H, seed=1), "v": real(B, T, H, seed=2)}
    feeds |= {"ks": real(C, H, seed=3), "qs": real(C, H, seed=4), "cs": real(C, H, seed=5) if outputs[1:] else None}
    check(*fused("EngramGate", feeds, {"epsilon": 0.01}, outputs, dynamic=dynamic))


def test_a_gate_of_orthogonal_vectors_is_a_half():
    """The product is 0, and so is its sign; the gradient of the root is finite."""
    feeds = {"k": np.zeros((1, 1, 1, H), np.float32), "q": real(1, 1, 1, H), "v": real(1, 1, H, seed=1)}
    feeds |= {"ks": np.ones((1, H), np.float32), "qs": np.ones((1, H), np.float32)}
    model, given = fused("EngramGate", feeds, {})
    found = normal_form(model)
    assert_same(run(model, given), run(found, given))
    assert_same([feeds["v"][:, :, None] / 2], run(found, given))


# onnxruntime has no kernel of the next one for the CPU: the formula in its documentation is the expectation


@pytest.mark.parametrize("d", [2, 4])
def test_gated_bias_of_relative_positions(d):
    n, size, length = 2, 3, 4
    feeds = {"q": real(B, length, n * size), "b": real(n * size, seed=1), "p": real(1, n, length, length, seed=2)}
    feeds |= {"w": real(size, 2 * d, seed=3), "wb": real(2 * d, seed=4), "a": real(1, n, 1, 1, seed=5)}
    heads = (feeds["q"] + feeds["b"]).reshape(B, length, n, size).transpose(0, 2, 1, 3)
    sums = (heads @ feeds["w"] + feeds["wb"]).reshape(B, n, length, 2, d).sum(-1)
    u, r = np.split(1 / (1 + np.exp(-sums)), 2, -1)
    expected = (u * (r * feeds["a"] - 1) + 2) * feeds["p"]
    model, given = fused("GatedRelativePositionBias", feeds, {"num_heads": n})
    found = normal_form(model)
    assert_same([expected], run(found, given), atol=1e-5)
    assert wrong_gradients(model, found, given, list(given)) == []


@pytest.mark.parametrize("bidirectional", [0, 1])
def test_bias_of_relative_positions(bidirectional):
    """T5's buckets, in NumPy."""
    buckets, heads, farthest, queries, keys = 8, 2, 20, 6, 30
    table = real(buckets, heads)
    feeds = {"t": table, "q": np.array([queries]), "k": np.array([keys])}
    away = np.arange(keys) - np.arange(queries)[:, None]
    each = buckets // (1 + bidirectional)
    far = np.abs(away) if bidirectional else np.maximum(-away, 0)
    logarithms = np.log(np.maximum(far, 1) / (each // 2)) / np.log(farthest / (each // 2))
    large = np.minimum(each // 2 + (logarithms * (each - each // 2)).astype(int), each - 1)
    bucket = np.where(far < each // 2, far, large) + (each * (away > 0) if bidirectional else 0)
    attrs = {"max_distance": farthest, "is_bidirectional": bidirectional}
    model, given = fused("RelativePositionBias", feeds, attrs)
    found = normal_form(model)
    assert_same([table[bucket].transpose(2, 0, 1)[None]], run(found, given))
    assert wrong_gradients(model, found, given, ["t"]) == []


def test_what_has_no_form_is_refused():
    model, _ = fused("BranchwiseRMSNorm", {"x": STREAMS, "s": real(H)}, {}, dynamic=True)
    with pytest.raises(ModelError, match=r"'fused'.*a scale or a hidden axis of unknown size"):
        normal_form(model)

"""Attention's outputs and gradients are those of PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

import gradgraph as gg
from tests.kit.small_models import assert_same, model_of, real, run

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch

B, H, S, D = 2, 4, 6, 8
MASK = np.random.default_rng(0).random((B, 1, S, S)) < 0.7
MASK[..., 0] = True

CASES = {
    "plain": ({}, {}, {}),
    "causal": ({"is_causal": 1}, {"is_causal": True}, {}),
    "scaled": ({"scale": 0.2}, {"scale": 0.2}, {}),
    "boolean mask": ({}, {}, {"m": MASK}),
    "bias": ({}, {}, {"m": real(1, H, S, S, seed=5)}),
    "grouped": ({}, {"enable_gqa": True}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_scaled_dot_product_attention(case):
    attrs, arguments, mask = CASES[case]
    kv = 2 if case == "grouped" else H
    feeds = {"q": real(B, H, S, D), "k": real(B, kv, S, D, seed=1), "v": real(B, kv, S, D, seed=2)} | mask
    model = model_of([helper.make_node("Attention", list(feeds), ["y"], **attrs)], feeds, opset=24)
    wrt = [n for n, a in feeds.items() if a.dtype == np.float32]
    dy = real(B, H, S, D, seed=3)

    theirs = {n: torch.tensor(a, requires_grad=n in wrt) for n, a in feeds.items()}
    expected = torch.nn.functional.scaled_dot_product_attention(
        theirs["q"], theirs["k"], theirs["v"], theirs.get("m"), **arguments
    )
    expected.backward(torch.from_numpy(dy))
    gradients = [theirs[n].grad.numpy() for n in wrt]
    found = run(gg.vjp(model, wrt=wrt), feeds | {"y.cotangent": dy})
    assert_same([expected.detach().numpy(), *gradients], found, atol=2e-6)

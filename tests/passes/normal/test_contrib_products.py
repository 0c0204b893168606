"""Fused and quantized products of com.microsoft, written with standard operators."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

from gradgraph.errors import ModelError
from tests.kit.differences import wrong_gradients
from tests.kit.small_models import assert_same, model_of, normal_form, real, run
from tests.passes.normal.test_contrib import MICROSOFT, check, fused, packed


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "fed"])
@pytest.mark.parametrize("kind", [0, 1], ids=["fp4", "nf4"])
@pytest.mark.parametrize(("n", "k", "block"), [(6, 32, 16), (5, 32, 64), (4, 64, 32)])
def test_weights_of_bitsandbytes(n, k, block, kind, constant):
    count = n * k
    codes = np.random.default_rng(0).integers(0, 16, count + count % 2)
    weights = {"q": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)}
    weights["m"] = np.abs(real(-(-count // block), seed=1)) + 0.1
    a = {"a": real(2, 3, k)}
    attrs = {"N": n, "K": k, "block_size": block, "quant_type": kind}
    node = helper.make_node("MatMulBnb4", ["a", "q", "m"], ["y"], "fused", domain="com.microsoft", **attrs)
    given = a if constant else a | weights
    model = model_of([node], given, opset=17, weights=weights if constant else None, domains=MICROSOFT)
    check(model, given, wrt=["a"] if constant else ["a", "m"], atol=1e-4)


def test_weights_of_bitsandbytes_that_are_not_transposed():
    rng = np.random.default_rng(0)
    feeds = {"a": real(2, 6), "q": rng.integers(0, 256, 96).astype(np.uint8), "m": np.abs(real(12, seed=1))}
    plain, _ = fused("MatMulBnb4", feeds, {"N": 6, "K": 32, "block_size": 16, "quant_type": 1})
    columns, _ = fused("MatMulBnb4", feeds, {"N": 6, "K": 32, "block_size": 16, "quant_type": 1, "transB": 0})
    eye = np.eye(32, dtype=np.float32)
    for dim in plain.graph.input[0].type.tensor_type.shape.dim:
        dim.dim_value = 32
    (w,) = run(plain, feeds | {"a": eye})  # Wᵀ
    assert_same([feeds["a"] @ w.T], run(normal_form(columns), feeds), atol=1e-5)


# --- onnxruntime has no kernels of the next ones for the CPU: the parts, or the formula, are the expectation ---------


@pytest.mark.parametrize("bias", [False, True])
def test_gemm_and_gelu(bias):
    feeds = {"x": real(2, 3, 4), "w": real(4, 5, seed=1), "b": real(5, seed=2) if bias else None}
    model, given = fused("GemmFastGelu", feeds, {})
    gelu, parts = fused("FastGelu", {"x": feeds["x"] @ feeds["w"], "b": feeds["b"]}, {})
    found = normal_form(model)
    assert_same(run(gelu, parts), run(found, given), atol=3e-6)
    assert wrong_gradients(model, found, given, list(given)) == []


@pytest.mark.parametrize("activation", [{"activation": "Relu"}, {"activation": "LeakyRelu", "activation_alpha": 0.3}])
def test_product_and_activation(activation):
    feeds, attrs = {"a": real(2, 4, 3), "b": real(2, 4, 5)}, {"transA": 1, "alpha": 0.5}
    model, given = fused("FusedMatMulActivation", feeds, attrs | activation)
    product = 0.5 * feeds["a"].transpose(0, 2, 1) @ feeds["b"]
    expected = np.where(product > 0, product, activation.get("activation_alpha", 0) * product).astype(np.float32)
    found = normal_form(model)
    assert_same([expected], run(found, given))
    assert wrong_gradients(model, found, given, ["a", "b"]) == []


def test_gemmas_rotary_embedding():
    angles, shape = real(2, 3, 4), (2, 2, 3, 4)
    feeds = {"e": angles, **{n: real(*shape, seed=i).astype(np.float16) for i, n in enumerate(["q", "qr", "k", "kr"])}}
    model, given = fused("GemmaRotaryEmbedding", feeds, {}, ["y", "z"])
    cos, sin = (f(angles)[:, None].astype(np.float16) for f in (np.cos, np.sin))
    expected = [given["q"] * cos + given["qr"] * sin, given["k"] * cos + given["kr"] * sin]
    assert_same(expected, run(normal_form(model), given), atol=5e-3)


@pytest.mark.parametrize("op", ["BitmaskDropout", "BitmaskBiasDropout"])
def test_dropout_with_a_mask_of_bits_that_nothing_reads(op):
    x, bias = real(2, 4), real(4, seed=1)
    feeds = {"x": x} | ({"b": bias, "r": x} if op == "BitmaskBiasDropout" else {})
    model, given = fused(op, feeds, {"seed": 1})
    found = normal_form(model)
    assert_same([x + bias + x if "b" in feeds else x], run(found, given))
    assert wrong_gradients(model, found, given, list(given)) == []
    model, _ = fused(op, feeds, {}, ["y", "mask"])
    with pytest.raises(ModelError, match=r"'fused'.*its mask as single bits"):
        normal_form(model)


@pytest.mark.parametrize("op", ["NhwcConv", "NhwcFusedConv"])
@pytest.mark.parametrize("attrs", [{}, {"group": 2, "pads": [1, 0, 1, 2], "strides": [2, 1]}], ids=["plain", "groups"])
def test_convolution_with_channels_last(op, attrs):
    groups = attrs.get("group", 1)
    x, w, b = real(2, 4, 5, 6), real(6, 4 // groups, 3, 3, seed=1), real(6, seed=2)
    plain = model_of([helper.make_node("Conv", ["x", "w", "b"], ["y"], **attrs)], {"x": x, "w": w, "b": b})
    (expected,) = run(plain, {"x": x, "w": w, "b": b})
    feeds = {"x": x.transpose(0, 2, 3, 1).copy(), "w": w, "b": b}
    if op == "NhwcConv":
        feeds["w"] = w.transpose(0, 2, 3, 1).copy()
    else:
        feeds["z"] = real(*expected.transpose(0, 2, 3, 1).shape, seed=3)
        attrs = attrs | {"activation": "Relu"}
        expected = np.maximum(expected + feeds["z"].transpose(0, 3, 1, 2), 0)
    model, given = fused(op, feeds, attrs)
    found = normal_form(model)
    assert_same([expected.transpose(0, 2, 3, 1)], run(found, given), atol=1e-5)
    assert wrong_gradients(model, found, given, list(given)) == []


K, BLOCK = 32, 16


def quantized(rows, seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, K))
    scales = rng.uniform(0.1, 1, (rows, K // BLOCK)).astype(np.float32)
    w = ((codes - 8) * np.repeat(scales, BLOCK, 1)).astype(np.float32)
    return packed(codes, 4).reshape(rows, K // BLOCK, -1), scales, w


def normed(x, scale, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_a_gated_layer_of_four_bits(norm, skip):
    a, s, scale = real(2, 3, K), real(2, 3, K, seed=1), real(K, seed=2)
    (gate, gate_scales, wg), (up, up_scales, wu) = (quantized(5, seed) for seed in (3, 4))
    bias = real(5, seed=5)
    feeds = {"a": a, "s": s if skip else None, "n": scale if norm else None}
    feeds |= {"gq": gate, "gs": gate_scales, "gb": bias, "uq": up, "us": up_scales}
    attrs = {"activation": "silu", "K": K, "N": 5, "block_size": BLOCK, "epsilon": 0.01}
    model, given = fused("MatMulNBitsMlp", feeds, attrs, ["y", "sum"] if skip else ["y"])
    total = a + s if skip else a
    x = normed(total, scale, 0.01) if norm else total
    g = x @ wg.T + bias
    expected = [(g / (1 + np.exp(-g)) * (x @ wu.T)).astype(np.float32)]
    found = normal_form(model)
    assert_same(expected + [total] * skip, run(found, given), atol=1e-3, rtol=1e-4)
    floats = ["a", "gb"] + ["s"] * skip + ["n"] * norm
    assert wrong_gradients(model, found, given, floats) == []


@pytest.mark.parametrize("skip", [False, True])
def test_projections_of_four_bits(skip):
    a, s, scale = real(2, 3, K), real(2, 3, K, seed=1), real(K, seed=2)
    parts = [quantized(rows, seed) for rows, seed in ((6, 3), (4, 4), (4, 5))]
    feeds = {"a": a, "s": s if skip else None, "n": scale}
    for name, (q, scales, _) in zip("qkv", parts, strict=True):
        feeds |= {f"{name}q": q, f"{name}s": scales, f"{name}b": real(len(q), seed=6) if name == "k" else None}
    attrs = {"K": K, "Nq": 6, "Nkv": 4, "block_size": BLOCK, "epsilon": 0.01}
    model, given = fused("MatMulNBitsQkv", feeds, attrs, ["y", "k", "v", "sum"][: 4 if skip else 3])
    total = a + s if skip else a
    x = normed(total, scale, 0.01)
    expected = [x @ w.T + (real(4, seed=6) if i == 1 else 0) for i, (_, _, w) in enumerate(parts)]
    found = normal_form(model)
    assert_same(expected + [total] * skip, run(found, given), atol=1e-3, rtol=1e-4)
    assert wrong_gradients(model, found, given, ["a", "n", "kb"]) == []


def of_weights(op, attrs, a, weights, names):
    """A node whose weights, of any type, are stored."""
    node = helper.make_node(op, names, ["y"], "fused", domain="com.microsoft", **attrs)
    model = model_of([node], {"a": a}, domains=MICROSOFT)
    model.graph.initializer.extend(weights)
    return model


@pytest.mark.parametrize("k", [32, 24])
def test_weights_in_floats_of_eight_bits(k):
    a, w = real(3, k).astype(np.float16), real(5, k, seed=1).astype(ml_dtypes.float8_e4m3fn)
    scales, bias = np.abs(real(5, -(-k // BLOCK), seed=2)), real(5, seed=3).astype(np.float16)
    stored = [helper.make_tensor("b", onnx.TensorProto.FLOAT8E4M3FN, [5, k], w.tobytes(), raw=True)]
    stored += [onnx.numpy_helper.from_array(x, n) for n, x in (("s", scales), ("c", bias))]
    op, attrs = "MatMulBlockQuantizedFp8Weight", {"block_size": BLOCK}
    model = of_weights(op, attrs, a, stored, ["a", "b", "s", "", "c"])
    dense = w.astype(np.float32) * np.repeat(scales, BLOCK, 1)[:, :k]
    found = run(normal_form(model), {"a": a})
    assert_same([(a.astype(np.float32) @ dense.T + bias).astype(np.float16)], found, atol=0.02, rtol=5e-3)
    stored.append(onnx.numpy_helper.from_array(np.array(0.5, np.float32), "as"))
    with pytest.raises(ModelError, match=r"'fused'.*rounds its input to 8-bit floats"):
        normal_form(of_weights(op, attrs, a, stored, ["a", "b", "s", "as"]))


@pytest.mark.parametrize("k", [32, 24])
def test_weights_in_floats_of_four_bits(k):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (5, k)).astype(np.uint8)
    scales = np.abs(real(5, -(-k // BLOCK), seed=2)).astype(ml_dtypes.float8_e4m3fn)
    a = real(3, k).astype(np.float16)
    stored = [
        onnx.numpy_helper.from_array(x, n)
        for n, x in (("b", packed(codes, 4)), ("s", scales.view(np.uint8)), ("g", np.array(0.5, np.float32)))
    ]
    model = of_weights("MatMulBlockQuantizedFp4Weight", {"block_size": BLOCK}, a, stored, ["a", "b", "s", "g"])
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    dense = values * 0.5 * np.repeat(scales.astype(np.float32), BLOCK, 1)[:, :k]
    found = run(normal_form(model), {"a": a})
    assert_same([(a.astype(np.float32) @ dense.T).astype(np.float16)], found, atol=0.02, rtol=5e-3)


REFUSED = {
    "'fused'.*the activation 'gelu'": (
        "MatMulNBitsMlp",
        {"a": real(2, K), "s": None, "n": None, "gq": quantized(5, 1)[0], "gs": quantized(5, 1)[1], "gb": None}
        | {"uq": quantized(5, 2)[0], "us": quantized(5, 2)[1]},
        {"activation": "gelu", "K": K, "N": 5, "block_size": BLOCK},
    ),
    "'fused'.*weights of the type 2": (
        "MatMulBnb4",
        {"a": real(2, 32), "q": np.zeros(96, np.uint8), "m": real(12)},
        {"N": 6, "K": 32, "block_size": 16, "quant_type": 2},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_option_without_a_form_is_named(message):
    model, _ = fused(*REFUSED[message])
    with pytest.raises(ModelError, match=message):
        normal_form(model)

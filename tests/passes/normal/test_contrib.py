"""Fused operators of com.microsoft, written with standard ones: onnxruntime gives the same for both."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

import gradgraph as gg
from gradgraph.errors import ModelError, UnsupportedOperatorError
from tests.kit.differences import wrong_gradients
from tests.kit.small_models import assert_same, model_of, normal_form, real, run

MICROSOFT = {"com.microsoft": 1}
B, S, H, D = 2, 3, 2, 4
X = real(B, S, H * D)
VECTOR = real(H * D, seed=1)


def fused(op, feeds, attrs, outputs=("y",), dynamic=False, domain="com.microsoft"):
    given = {n: a for n, a in feeds.items() if a is not None}
    inputs = {n: (a.dtype, [f"{n}{i}" for i in range(a.ndim)]) for n, a in given.items()} if dynamic else given
    names = [n if a is not None else "" for n, a in feeds.items()]
    node = helper.make_node(op, names, list(outputs), domain=domain, name="fused", **attrs)
    return model_of([node], inputs, [o for o in outputs if o], 17, domains=MICROSOFT), given


def smooth(feeds):
    return [n for n, a in feeds.items() if a is not None and a.dtype == np.float32]


ACTIVATED = [
    ("Relu", []),
    ("Sigmoid", []),
    ("Tanh", []),
    ("LeakyRelu", [0.3]),
    ("Clip", [-0.5, 0.75]),
    ("HardSigmoid", [0.3, 0.4]),
]
IMAGE = {"x": real(1, 4, 5, 5), "w": real(6, 2, 3, 3, seed=1), "b": real(6, seed=2)}
MATRICES = {"x": real(3, 4), "w": real(4, 5, seed=1), "b": real(5, seed=2)}

SIMPLE = {
    "Gelu": ("Gelu", {"x": X}, {}),
    "BiasGelu": ("BiasGelu", {"x": X, "b": VECTOR}, {}),
    "FastGelu": ("FastGelu", {"x": X}, {}),
    "FastGelu, bias": ("FastGelu", {"x": X, "b": VECTOR}, {}),
    "QuickGelu": ("QuickGelu", {"x": X}, {}),
    "QuickGelu, alpha": ("QuickGelu", {"x": X}, {"alpha": 0.5}),
    "ScaledSiLU": ("ScaledSiLU", {"x": X}, {"alpha": 0.7}),
    "FusedMatMul": ("FusedMatMul", {"a": real(2, 3, 4), "b": real(4, 5)}, {"alpha": 0.5}),
    "FusedMatMul, A": ("FusedMatMul", {"a": real(2, 4, 3), "b": real(2, 4, 5)}, {"transA": 1}),
    "FusedMatMul, B": ("FusedMatMul", {"a": real(2, 3, 4), "b": real(5, 4)}, {"transB": 1, "alpha": 2.0}),
    "FusedMatMul, batch A": ("FusedMatMul", {"a": real(3, 2, 6, 4), "b": real(2, 6, 4, 5)}, {"transBatchA": 1}),
    "FusedMatMul, batch and A": (
        "FusedMatMul",
        {"a": real(4, 2, 6, 3), "b": real(2, 6, 4, 5)},
        {"transBatchA": 1, "transA": 1},
    ),
    "FusedMatMul, batch and B": (
        "FusedMatMul",
        {"a": real(2, 6, 3, 4), "b": real(5, 2, 6, 4)},
        {"transBatchB": 1, "transB": 1},
    ),
    "FusedMatMul, vector": ("FusedMatMul", {"a": real(4), "b": real(4, 5)}, {"transA": 1}),
    "TransposeMatMul": ("TransposeMatMul", {"a": real(2, 4, 3), "b": real(4, 5)}, {"transA": 1, "alpha": 0.3}),
    **{
        f"FusedConv, {name}": (
            "FusedConv",
            IMAGE,
            {"activation": name, "activation_params": params, "group": 2, "pads": [1, 0, 1, 2], "strides": [2, 1]}
            if params
            else {"activation": name, "group": 2, "pads": [1, 0, 1, 2]},
        )
        for name, params in ACTIVATED
    },
    "FusedConv, added": ("FusedConv", IMAGE | {"z": real(1, 6, 3, 3, seed=3)}, {"activation": "Relu", "group": 2}),
    **{
        f"FusedGemm, {name}": (
            "FusedGemm",
            MATRICES,
            {"activation": name, "alpha": 0.5, "beta": 2.0}
            | dict(zip(["activation_alpha", "activation_beta"], params, strict=False)),
        )
        for name, params in ACTIVATED
        if name != "Clip"
    },
    "SkipLayerNormalization, 2-D skip": (
        "SkipLayerNormalization",
        {"x": X, "s": real(S, H * D, seed=2), "g": VECTOR},
        {"epsilon": 0.01},
    ),
    "WordConvEmbedding": (
        "WordConvEmbedding",  # a word of all characters, shorter ones, and one that is shorter than the window
        {
            "words": np.array([[1, 2, 3, 4, 5, 1], [5, 4, 3, 0, 0, 0], [3, 3, 2, 1, -1, -1], [2, 0, 0, 0, 0, 0]], "i4"),
            "w": real(4, 1, 3, 2),
            "b": real(4, seed=1),
            "c": real(6, 2, seed=2),
        },
        {"embedding_size": 4, "conv_window_size": 3, "char_embedding_size": 2},
    ),
}


OF_CONVOLUTIONS = ("FusedConv", "WordConv")  # nobody leaves their weights' sizes open
OPEN = [name for name in SIMPLE if not name.startswith(OF_CONVOLUTIONS)]


@pytest.mark.parametrize(("case", "dynamic"), [*((c, False) for c in SIMPLE), *((c, True) for c in OPEN)])
def test_fused_operator(case, dynamic):
    op, feeds, attrs = SIMPLE[case]
    check(*fused(op, feeds, attrs, dynamic=dynamic))


def check_values(model, feeds, **tolerance):
    found = normal_form(model)
    assert {o.domain for o in found.opset_import} == {""}
    assert_same(run(model, feeds), run(found, feeds), **{"atol": 3e-6, "rtol": 1e-4, **tolerance})
    return found


def check(model, feeds, wrt=None, **tolerance):
    found = check_values(model, feeds, **tolerance)
    assert wrong_gradients(model, found, feeds, smooth(feeds) if wrt is None else wrt) == []


NORMALIZED = {"x": X, "s": real(B, S, H * D, seed=2), "g": VECTOR}
BETA, BIAS = {"b": real(H * D, seed=3)}, {"c": real(H * D, seed=4)}


@pytest.mark.parametrize("rest", [{}, BETA, BETA | BIAS, {"b": None} | BIAS], ids=["", "beta", "beta, bias", "bias"])
@pytest.mark.parametrize("outputs", [["y"], ["y", "", "", "sum"]], ids=["y", "y and sum"])
def test_skip_layer_normalization(rest, outputs):
    check(*fused("SkipLayerNormalization", NORMALIZED | rest, {"epsilon": 0.01}, outputs))


@pytest.mark.parametrize("rest", [{}, BIAS], ids=["", "bias"])
def test_skip_simplified_layer_normalization(rest):
    check(*fused("SkipSimplifiedLayerNormalization", NORMALIZED | rest, {"epsilon": 0.01}, ["y", "", "", "sum"]))


@pytest.mark.parametrize("outputs", [["y"], ["y", "inverse"]])
def test_simplified_layer_normalization_stands_in_the_default_domain(outputs):
    feeds = {"x": X, "g": VECTOR}
    check(*fused("SimplifiedLayerNormalization", feeds, {"epsilon": 0.01, "axis": -1}, outputs, domain=""))


IDS = np.array([[1, 4, 0], [2, 2, 3]], np.int32)
TABLES = {"w": real(5, 8), "p": real(6, 8, seed=1), "k": real(2, 8, seed=2), "g": real(8, seed=3), "b": real(8, seed=4)}
WORD_MASK = {"m": np.array([[1, 1, 0], [1, 1, 1]], np.int32)}
KINDS = np.array([[0, 1, 1], [0, 0, 1]], np.int32)

EMBEDDINGS = {
    "all": ({"i": IDS, "s": KINDS} | TABLES | WORD_MASK, ["y", "mask_index", "sum"]),
    "no mask": ({"i": IDS, "s": KINDS} | TABLES, ["y", "mask_index"]),
    "no segments": ({"i": IDS, "s": None} | TABLES | {"k": None} | WORD_MASK, ["y", "mask_index"]),
    "positions": (
        {"i": IDS, "s": KINDS} | TABLES | {"m": None, "q": np.array([[0, 5, 1], [2, 2, 2]], np.int32)},
        ["y", "mask_index"],
    ),
}


@pytest.mark.parametrize("case", EMBEDDINGS)
def test_embed_layer_normalization(case):
    feeds, outputs = EMBEDDINGS[case]
    check(*fused("EmbedLayerNormalization", feeds, {"epsilon": 0.01}, outputs))


# onnxruntime has no kernels of the next ones for the CPU: the formula is the expectation

GROUPED = {"x": real(2, 3, 3, 4), "g": real(4, seed=1), "b": real(4, seed=2)}


def _group_norm(x, gamma, beta, groups, activation, epsilon=1e-5):
    n, h, w, c = x.shape
    parts = x.reshape(n, h * w, groups, c // groups)
    mean, var = parts.mean((1, 3), keepdims=True), parts.var((1, 3), keepdims=True)
    y = ((parts - mean) / np.sqrt(var + epsilon)).reshape(x.shape) * gamma + beta
    return y / (1 + np.exp(-y)) if activation else y


@pytest.mark.parametrize("activation", [0, 1])
@pytest.mark.parametrize("last", [0, 1])
def test_group_norm(last, activation):
    feeds = GROUPED | {"x": GROUPED["x"] if last else GROUPED["x"].transpose(0, 3, 1, 2).copy()}
    attrs = {"groups": 2, "activation": activation, "channels_last": last}
    model, _ = fused("GroupNorm", feeds, attrs)
    expected = _group_norm(GROUPED["x"], GROUPED["g"], GROUPED["b"], 2, activation)
    (found,) = run(normal_form(model), feeds)
    assert_same([expected], [found if last else found.transpose(0, 2, 3, 1)], atol=1e-5)


SKIPS = {
    "": (real(2, 3, 3, 4, seed=3), None),
    "one per image": (real(2, 1, 1, 4, seed=3), None),
    "flat": (real(2, 4, seed=3), None),
    "bias": (real(2, 3, 3, 4, seed=3), real(4, seed=4)),
    "flat, bias": (real(2, 4, seed=3), real(4, seed=4)),
}


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("last", [0, 1])
def test_skip_group_norm(last, skip):
    added, bias = SKIPS[skip]
    total = GROUPED["x"] + (added[:, None, None] if added.ndim == 2 else added) + (0 if bias is None else bias)
    expected = _group_norm(total, GROUPED["g"], GROUPED["b"], 2, 1, 0.01)
    feeds = GROUPED | {"s": added} | ({} if bias is None else {"c": bias})
    if not last:
        feeds |= {n: np.moveaxis(a, -1, 1).copy() for n, a in feeds.items() if a.ndim == 4}
    attrs = {"groups": 2, "activation": 1, "channels_last": last, "epsilon": 0.01}
    model, _ = fused("SkipGroupNorm", feeds, attrs, ["y", "sum"])
    found = run(normal_form(model), feeds)
    assert_same([expected, total], found if last else [np.moveaxis(a, 1, -1) for a in found], atol=1e-5)
    assert wrong_gradients(model, normal_form(model), feeds, smooth(feeds)) == []


@pytest.mark.parametrize("dynamic", [False, True])
def test_bias_add(dynamic):
    feeds = {"x": X, "b": VECTOR, "s": NORMALIZED["s"]}
    model, _ = fused("BiasAdd", feeds, {}, dynamic=dynamic)
    assert_same([X + VECTOR + feeds["s"]], run(normal_form(model), feeds))
    assert wrong_gradients(model, normal_form(model), feeds, list(feeds)) == []


RATIO, TRAINING = np.array(0.4, np.float32), np.array(True)
DROPPED = {
    "": ({}, {}),
    "residual": ({"s": NORMALIZED["s"]}, {}),
    "whole bias": ({"b": real(*X.shape, seed=5)}, {}),
    "not training": ({"s": None, "r": RATIO}, {}),
    "training": ({"s": None, "r": RATIO, "t": TRAINING}, {"seed": 3}),
    "training, residual": ({"s": NORMALIZED["s"], "r": RATIO, "t": TRAINING}, {"seed": 3}),
    "training, half": ({"s": None, "r": None, "t": TRAINING}, {}),
}


@pytest.mark.parametrize("case", DROPPED)
def test_bias_dropout(case):
    rest, attrs = DROPPED[case]
    feeds = {"x": X, "b": VECTOR} | rest
    model, given = fused("BiasDropout", feeds, attrs, ["y", "mask"])
    y, mask = run(normal_form(model), given)
    training = "t" in given
    assert mask.dtype == bool and mask.all() != training
    kept = mask / (1 - given.get("r", 0.5)) if training else mask
    expected = ((X + feeds["b"]) * kept + given.get("s", 0)).astype(np.float32)
    assert_same([expected], [y])
    if not training:
        assert wrong_gradients(model, normal_form(model), given, smooth(feeds | {"r": None})) == []


def test_bias_softmax_over_the_last_axes():
    feeds = {"x": real(2, 3, 4, 5), "b": real(2, 1, 4, 5, seed=1)}
    model, _ = fused("BiasSoftmax", feeds, {"axis": 2, "is_inner_broadcast": 1})
    scores = np.exp(feeds["x"] + feeds["b"])
    assert_same([scores / scores.sum((2, 3), keepdims=True)], run(normal_form(model), feeds))


def test_bias_split_gelu():
    feeds = {"x": X, "b": VECTOR}
    left, right = np.split(X + VECTOR, 2, axis=-1)
    gelu, _ = fused("Gelu", {"x": right}, {})
    model, _ = fused("BiasSplitGelu", feeds, {})
    assert_same([left * run(gelu, {"x": right})[0]], run(normal_form(model), feeds))
    assert wrong_gradients(model, normal_form(model), feeds, ["x", "b"]) == []


# --- integers, of which onnxruntime has kernels ---------------------------------------------------------------------

POOLS = {
    "plain": ((1, 5, 6, 3), {"kernel_shape": [2, 3]}),
    "padded": ((2, 5, 6, 3), {"kernel_shape": [3, 3], "pads": [1, 0, 1, 2], "strides": [2, 1]}),
    "ceil": ((1, 6, 6, 2), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    "dilated": ((1, 7, 7, 2), {"kernel_shape": [2, 2], "dilations": [2, 3]}),
    "same": ((1, 5, 5, 2), {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"}),
    "1-D": ((2, 6, 3), {"kernel_shape": [3], "strides": [2]}),
    "3-D": ((1, 3, 4, 3, 2), {"kernel_shape": [2, 2, 2]}),
}


def whole(dtype, *shape):
    """Numbers over the whole range of an integer type."""
    limits = np.iinfo(dtype)
    return np.random.default_rng(0).integers(limits.min, limits.max, shape, dtype, endpoint=True)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("case", POOLS)
def test_nhwc_max_pool(case, dtype):
    shape, attrs = POOLS[case]
    check_values(*fused("NhwcMaxPool", {"x": whole(dtype, *shape)}, attrs), atol=0, rtol=0)


SCALES = {
    "scalar": ((), {}),
    "one": ((1,), {}),
    "axis": ((4,), {"axis": 1}),
    "last axis": ((3,), {"axis": -1}),
    "first axis": ((2,), {"axis": 0}),
}


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
@pytest.mark.parametrize("case", SCALES)
def test_quantize_and_dequantize(case, dtype):
    shape, attrs = SCALES[case]
    scale, zero = np.abs(real(*shape, seed=1)) + 0.1, whole(dtype, *shape)
    given = {"s": np.asarray(scale, np.float32), "z": np.asarray(zero, dtype)}
    check_values(*fused("QuantizeLinear", {"x": 300 * real(2, 4, 3)} | given, attrs), atol=0, rtol=0)
    check(*fused("DequantizeLinear", {"x": whole(dtype, 2, 4, 3)} | given, attrs), wrt=["s"], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("op", "x"), [("QuantizeLinear", 300 * real(5)), ("DequantizeLinear", whole(np.int32, 5))], ids=["Q", "DQ"]
)
def test_quantization_without_zero_point(op, x):
    check_values(*fused(op, {"x": x, "s": np.array(0.7, np.float32)}, {}), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", ["INT4", "UINT4"])
def test_quantize_to_four_bits_and_back(dtype):
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], domain="com.microsoft", axis=1),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], domain="com.microsoft", axis=1),
    ]
    feeds = {"x": 5 * real(2, 4, 3)}
    model = model_of(nodes, feeds, weights={"s": np.abs(real(4, seed=1)) + 0.1}, domains=MICROSOFT)
    zero = helper.make_tensor("z", TensorProto.DataType.Value(dtype), [4], [0, 1, 2, 3])
    model.graph.initializer.append(zero)
    check_values(model, feeds, atol=0, rtol=0)


# --- quantized weights -------------------------------------------------------------------------------------


def packed(numbers, bits):
    """Rows of small numbers in bytes, the first in the lowest bits."""
    each = 8 // bits
    padded = np.pad(numbers, [(0, 0), (0, -numbers.shape[1] % each)])
    parts = padded.reshape(len(padded), -1, each) << np.arange(0, 8, bits)
    return parts.sum(-1).astype(np.uint8)


@pytest.mark.parametrize("zero", [None, "packed", "float"])
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "fed"])
@pytest.mark.parametrize(("bits", "block", "k"), [(4, 16, 32), (4, 32, 48), (8, 16, 32), (2, 16, 32)])
def test_product_with_quantized_weights(bits, block, k, constant, zero):
    n, blocks, rng = 5, -(-k // block), np.random.default_rng(0)
    q = rng.integers(0, 2**bits, (n, blocks * block))
    zeros = rng.integers(0, 2**bits, (n, blocks))
    weights = {"q": packed(q, bits).reshape(n, blocks, -1), "s": np.abs(real(n, blocks, seed=1)) + 0.1}
    weights |= {"packed": {"z": packed(zeros, bits)}, "float": {"z": (zeros + 0.25).astype(np.float32)}, None: {}}[zero]
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": 1}  # 1: not rounded
    node = helper.make_node("MatMulNBits", ["a", *weights], ["y"], domain="com.microsoft", **attrs)
    a = real(2, 3, k)
    given = {"a": a} if constant else {"a": a} | weights
    model = model_of([node], given, weights=weights if constant else None, opset=17, domains=MICROSOFT)
    found = normal_form(model)
    shift = 2 ** (bits - 1) if zero is None else np.repeat(zeros + 0.25 * (zero == "float"), block, 1)
    w = ((q - shift) * np.repeat(weights["s"], block, 1))[:, :k]
    assert_same([a @ w.T.astype(np.float32)], run(found, given), atol=1e-4)
    if (bits, zero) != (8, "float"):  # for which onnxruntime has no kernel
        assert_same(run(model, given), run(found, given), atol=1e-4)
    assert wrong_gradients(model, found, given, ["a"]) == []


def test_an_unknown_option_is_named():
    model, _ = fused("FusedConv", IMAGE, {"activation": "Mystery", "group": 2})
    with pytest.raises(ModelError, match=r"'fused'.*activation 'Mystery'"):
        normal_form(model)


def test_what_lies_behind_a_fused_operator_has_a_shape():
    nodes = [
        helper.make_node("FusedMatMul", ["x", "w"], ["h"], domain="com.microsoft"),
        helper.make_node("Softmax", ["h"], ["y"]),  # of opset 11: over all axes from the first
    ]
    model = model_of(nodes, {"x": real(2, 3, 4)}, opset=11, weights={"w": real(4, 5)}, domains=MICROSOFT)
    assert_same(run(model, {"x": real(2, 3, 4)}), run(normal_form(model), {"x": real(2, 3, 4)}))


def test_a_chain_of_fused_operators_has_shapes():
    """Also behind a form that asks for none, where shapes were asked for before it was written."""
    w = np.eye(4, dtype=np.float32)
    nodes = [
        helper.make_node("SimplifiedLayerNormalization", ["x", "s"], ["n"], axis=-1),
        helper.make_node("MatMul", ["n", "w"], ["h"]),
        helper.make_node("Add", ["h", "h"], ["d"]),
        helper.make_node("FusedMatMul", ["d", "w"], ["y"], domain="com.microsoft", transB=1),
    ]
    weights = {"s": VECTOR[:4], "w": w}
    model = model_of(nodes, {"x": (np.float32, ["batch", 3, 4])}, weights=weights, domains=MICROSOFT)
    x = {"x": real(2, 3, 4)}
    assert_same(run(model, x), run(normal_form(model), x))


def test_what_onnx_has_no_rule_for_has_a_shape_behind_a_fused_operator():
    """A norm without a rule, and Expand to the shape of what nobody knew before."""
    weights = {"s": VECTOR[:4], "w": np.eye(4, dtype=np.float32)}
    nodes = [
        helper.make_node("SimplifiedLayerNormalization", ["x", "s"], ["n"], axis=-1),
        helper.make_node("MeanVarianceNormalization", ["n"], ["h"], axes=[-1]),
        helper.make_node("Shape", ["h"], ["size"]),
        helper.make_node("Expand", ["x", "size"], ["wide"]),
        helper.make_node("Add", ["h", "wide"], ["d"]),
        helper.make_node("FusedMatMul", ["d", "w"], ["y"], domain="com.microsoft", transA=1),
    ]
    model = model_of(nodes, {"x": (np.float32, ["batch", 4, 4])}, weights=weights, domains=MICROSOFT)
    x = {"x": real(2, 4, 4)}
    assert_same(run(model, x), run(normal_form(model), x))


def test_an_unknown_fused_operator_is_named():
    node = helper.make_node("Mystery", ["x"], ["y"], domain="com.microsoft", name="mystery")
    model = model_of([node], {"x": real(2, 3, 3)}, domains=MICROSOFT)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, [2, 3, 3]))
    with pytest.raises(UnsupportedOperatorError, match=r"com\.microsoft\.Mystery"):
        gg.vjp(model, wrt=["x"])

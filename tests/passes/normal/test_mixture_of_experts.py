"""MoE and QMoE of com.microsoft, written with standard operators: onnxruntime's kernels give the same."""

from __future__ import annotations

import numpy as np
import pytest

from gradgraph.errors import ModelError
from tests.kit.differences import wrong_gradients
from tests.kit.small_models import assert_same, normal_form, real, run
from tests.passes.normal.test_contrib_attention import fused

TOKENS, EXPERTS, HIDDEN, INNER = 6, 4, 8, 12
MOE = {
    "x": real(TOKENS, HIDDEN), "router": real(TOKENS, EXPERTS, seed=1),
    "w1": real(EXPERTS, INNER, HIDDEN, seed=2), "b1": real(EXPERTS, INNER, seed=3),
    "w2": real(EXPERTS, HIDDEN, INNER, seed=4), "b2": real(EXPERTS, HIDDEN, seed=5),
}  # fmt: skip
TWO = {"w1": real(EXPERTS, 2 * INNER, HIDDEN, seed=2), "b1": real(EXPERTS, 2 * INNER, seed=3)}
SWIGLU = {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1, "normalize_routing_weights": 1}
GPT_OSS = SWIGLU | {"activation_alpha": 1.702, "activation_beta": 1.0}
CASES = {
    **{kind: (MOE, {"k": 2, "activation_type": kind}) for kind in ("gelu", "silu", "identity")},
    "relu, normalized": (MOE, {"k": 2, "normalize_routing_weights": 1}),
    "one expert": (MOE, {"activation_type": "silu"}),
    "all experts": (MOE, {"k": EXPERTS, "activation_type": "silu", "normalize_routing_weights": 1}),
    "no biases": (MOE | {"b1": None, "b2": None}, {"k": 2, "activation_type": "silu"}),
    "rows of samples": (MOE | {"x": real(2, 3, HIDDEN)}, {"k": 2, "activation_type": "silu"}),
    "swiglu": (MOE | TWO, SWIGLU),
    "swiglu of gpt-oss": (MOE | TWO, GPT_OSS | {"swiglu_limit": 7.0}),
    "swiglu, cut": (MOE | TWO, GPT_OSS | {"swiglu_limit": 0.5}),
}


@pytest.mark.parametrize("case", CASES)
def test_experts(case):
    feeds, attrs = CASES[case]
    model, given = fused("MoE", feeds, attrs)
    found = normal_form(model)
    assert_same(run(model, given), run(found, given), atol=1e-5, rtol=1e-5)
    assert wrong_gradients(model, found, given, list(given)) == []


def best_of_softmax(scores, k):
    p = np.exp(scores) / np.exp(scores).sum()
    return {e: p[e] for e in np.argsort(-p)[:k]}


def sparsely_mixed(scores, k):
    """As onnxruntime's kernel for CUDA goes through the experts; transformers' PhiMoE does the same in inference."""
    gates = {}
    for _ in range(k):
        others = [e for e in range(len(scores)) if e not in gates]
        best = max(others, key=lambda e: scores[e])
        near = [e for e in others if scores[best] - scores[e] <= 0.02 * max(abs(scores[e]), scores[best])]
        gates[best] = 1 / sum(np.exp(scores[e] - scores[best]) for e in near)
    return gates


def gated(feeds, k, gates=best_of_softmax):
    """What the documentation of the operator says, in float64, for layouts that only other processors run."""
    x, router, w1, w2, w3 = (feeds[n].astype(float) for n in ("x", "router", "w1", "w2", "w3"))
    y = np.zeros_like(x)
    for t, scores in enumerate(router):
        for e, gate in gates(scores, k).items():
            g, linear = w1[e] @ x[t], w3[e] @ x[t]
            y[t] += gate * (w2[e] @ (g / (1 + np.exp(-g)) * linear))
    return y.astype(np.float32)


WITH_A_THIRD = {"x": MOE["x"], "router": MOE["router"], "w1": MOE["w1"], "b1": None, "w2": MOE["w2"], "b2": None,
                "w3": real(EXPERTS, INNER, HIDDEN, seed=7)}  # fmt: skip


@pytest.mark.parametrize("kind", ["silu", "swiglu"])
def test_a_gate_with_a_third_weight(kind):
    model, given = fused("MoE", WITH_A_THIRD, {"k": 2, "activation_type": kind})
    assert_same([gated(WITH_A_THIRD, 2)], run(normal_form(model), given), atol=1e-5)


def test_a_sparse_mixer():
    """Scores of all signs, some of them near each other."""
    rng = np.random.default_rng(0)
    near = 1 + rng.choice([0, 0.005, 0.015, 0.03], (TOKENS, EXPERTS)) + rng.random((TOKENS, EXPERTS)) * 1e-3
    scores = (near * np.array([1, 3, -1, -3, 1, 1])[:, None]).astype(np.float32)
    feeds = WITH_A_THIRD | {"router": scores}
    model, given = fused("MoE", feeds, {"k": 2, "activation_type": "silu", "use_sparse_mixer": 1})
    found = normal_form(model)
    assert any(0.01 < gate < 0.99 for row in scores for gate in sparsely_mixed(row, 2).values())
    assert_same([gated(feeds, 2, sparsely_mixed)], run(found, given), atol=1e-5)
    assert wrong_gradients(found, found, given, ["x", "router"]) == []


def test_gates_that_lie_one_after_the_other():
    """``[g | l]``, which only other processors run, is the layout in turns with its rows moved."""
    in_turns, given = fused("MoE", MOE | TWO, GPT_OSS)
    places = [*range(0, 2 * INNER, 2), *range(1, 2 * INNER, 2)]
    moved = given | {"w1": given["w1"][:, places], "b1": given["b1"][:, places]}
    model, _ = fused("MoE", MOE | TWO, GPT_OSS | {"swiglu_fusion": 2})
    assert_same(run(in_turns, given), run(normal_form(model), moved), atol=1e-5)


def packed(bits, block, points, inputs=32, inner=64):
    """Feeds of QMoE whose numbers, scales and zero points are random."""
    rng = np.random.default_rng(bits + block)

    def numbers(*shape):
        return rng.integers(0, 256, shape, dtype=np.uint8)

    def layer(rows, columns):
        blocks = columns // block if block else 1
        scales = (rng.random((EXPERTS, rows, blocks)) * 0.02 + 0.01).astype(np.float32)
        per_row = (EXPERTS, rows, -(-blocks * bits // 8)) if block else (EXPERTS, -(-rows * bits // 8))
        zeros = numbers(*per_row) if points else None
        return numbers(EXPERTS, rows, columns * bits // 8), scales if block else scales[..., 0], zeros

    (q1, s1, z1), (q2, s2, z2) = layer(2 * inner, inputs), layer(inputs, inner)
    feeds = {"x": real(TOKENS, inputs), "router": MOE["router"], "q1": q1, "s1": s1, "b1": real(EXPERTS, 2 * inner),
             "q2": q2, "s2": s2, "b2": real(EXPERTS, inputs, seed=3)}  # fmt: skip
    return feeds | ({"q3": None, "s3": None, "b3": None, "z1": z1, "z2": z2} if points else {})


@pytest.mark.sweep(0.25)
@pytest.mark.parametrize("points", [False, True], ids=["middle", "zero points"])
@pytest.mark.parametrize("block", [0, 32])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_experts(bits, block, points):
    feeds = packed(bits, block, points)
    attrs = GPT_OSS | {"expert_weight_bits": bits} | ({"block_size": block} if block else {})
    model, given = fused("QMoE", feeds, attrs)
    wanted = run(model, given)
    found = normal_form(model)
    # onnxruntime multiplies rows of blocks of 8 bits in 8 bits
    assert_same(wanted, run(found, given), atol=1e-5 * np.abs(wanted[0]).max(), rtol=1e-4)
    assert wrong_gradients(found, found, given, ["x", "router"]) == []


def test_the_kernel_of_integers_normalizes_routing_weights_in_any_case():
    """Hence a model that asks for weights as they are is refused: it would train otherwise than it runs."""
    wanted, found = (run(*fused("QMoE", packed(4, 32, False), GPT_OSS | {"block_size": 32, "expert_weight_bits": 4,
                                                                        "normalize_routing_weights": asked}))
                     for asked in (1, 0))  # fmt: skip
    assert_same(wanted, found)


REFUSED = {
    "chooses 1 experts by a sparse mixer": ("MoE", MOE, {"use_sparse_mixer": 1}),
    "the activation 'geglu'": ("MoE", MOE | TWO, {"activation_type": "geglu", "swiglu_fusion": 1}),
    "without its second half": ("MoE", MOE | TWO, {"activation_type": "swiglu"}),
    "packed for one kind of processor": ("QMoE", packed(4, 32, False), GPT_OSS | {"weights_prepacked": 1}),
    "does not normalize its routing weights": (
        "QMoE",
        packed(4, 32, False),
        GPT_OSS | {"normalize_routing_weights": 0},
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_only_other_runtimes_run_is_named(reason):
    op, feeds, attrs = REFUSED[reason]
    model, _ = fused(op, feeds, attrs)
    with pytest.raises(ModelError, match=f"'fused'.*{reason}"):
        normal_form(model)


def axes_moved(feeds, weights, scales):
    """Experts whose weights, or scales, lie with their outputs last."""
    moved = {n: feeds[n].reshape(EXPERTS, -1, feeds[n].shape[1]) for n in weights}
    return feeds | moved | {n: feeds[n].transpose(0, 2, 1) for n in scales}


CUDA = {"weights": (("q1", "q2"), ()), "one weight": (("q1",), ()), "scales": ((), ("s1", "s2"))}


@pytest.mark.parametrize("moved", CUDA)
def test_experts_in_the_order_of_cuda_are_known_by_their_sizes(moved):
    """Its files say nothing else of it; without sizes that differ there is nothing to see."""
    model, _ = fused("QMoE", axes_moved(packed(4, 32, False), *CUDA[moved]), GPT_OSS | {"block_size": 32})
    with pytest.raises(ModelError, match=r"packed for one kind of processor.*qmoe_weights_prepacked=0"):
        normal_form(model)

"""Fused attention of com.microsoft, written with standard operators: onnxruntime gives the same for both."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from gradgraph.errors import ModelError
from tests.kit.differences import wrong_gradients
from tests.kit.small_models import assert_same, model_of, normal_form, real, run

B, S, H, D = 2, 3, 2, 4
HIDDEN = H * D
MICROSOFT = {"com.microsoft": 1}


def fused(op, feeds, attrs, outputs=("y",), shapes=None):
    """``shapes`` of outputs whose type onnxruntime does not infer."""
    given = {n: a for n, a in feeds.items() if a is not None}
    names = [n if a is not None else "" for n, a in feeds.items()]
    node = helper.make_node(op, names, list(outputs), domain="com.microsoft", name="fused", **attrs)
    model = model_of([node], given, [o for o in outputs if o], 17, domains=MICROSOFT)
    for i, value in enumerate(model.graph.output):
        if value.name in (shapes or {}):
            model.graph.output[i].CopyFrom(helper.make_tensor_value_info(value.name, 1, shapes[value.name]))
    return model, given


def check(op, feeds, attrs, outputs=("y",), wrt=None):
    model, given = fused(op, feeds, attrs, outputs)
    found = normal_form(model)
    assert_same(run(model, given), run(found, given), atol=3e-6, rtol=1e-4)
    floating = [n for n, a in given.items() if a.dtype == np.float32]
    assert wrong_gradients(model, found, given, floating if wrt is None else wrt) == []


MERGED = {"x": real(B, S, 5), "w": real(5, 3 * HIDDEN, seed=1), "b": real(3 * HIDDEN, seed=2)}
NO_MASK = {"m": None}
WORDS = {"m": np.array([[1, 1, 0], [1, 1, 1]], np.int32)}
PAIRS = {"m": np.array([[[1, 0, 0], [1, 1, 0], [0, 1, 1]], [[1, 1, 1]] * 3], np.int32)}
PAST = {"past": real(2, B, H, 2, D, seed=3)}
ADDED = {"past": None, "a": real(1, H, S, S, seed=4)}
WIDE = {"w": real(5, 2 * HIDDEN + 6, seed=1), "b": real(2 * HIDDEN + 6, seed=2)}

ATTENTION = {
    "plain": (MERGED, {}),
    "scaled": (MERGED, {"scale": 0.9}),
    "causal": (MERGED, {"unidirectional": 1}),
    "words": (MERGED | WORDS, {}),
    "words, causal, filter": (MERGED | WORDS, {"unidirectional": 1, "mask_filter_value": -3.0}),
    "pairs": (MERGED | PAIRS, {}),
    "lengths": (MERGED | {"m": np.array([2, 3], np.int32)}, {}),
    "lengths, and what only other runtimes read": (MERGED | {"m": np.array([2, 3, 0, 3, 6, 0, 2, 5], np.int32)}, {}),
    "ends and starts": (MERGED | {"m": np.array([2, 3, 0, 1], np.int32)}, {}),
    "added": (MERGED | NO_MASK | ADDED, {}),
    "words, added": (MERGED | WORDS | ADDED, {}),
    "wide values": (MERGED | WIDE, {"qkv_hidden_sizes": [HIDDEN, HIDDEN, 6]}),
    "past": (MERGED | NO_MASK | PAST, {"unidirectional": 1}),
    "past, words": (MERGED | {"m": np.array([[1, 0, 1, 1, 1], [1] * 5], np.int32)} | PAST, {}),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case):
    feeds, attrs = ATTENTION[case]
    outputs = ["y", "present"] if "past" in case else ["y"]
    check("Attention", feeds, attrs | {"num_heads": H}, outputs)


LENGTHS = [case for case in ATTENTION if case.startswith(("lengths", "ends"))]
BATCHES = {"of no name": (None, None), "of one name": ("batch", "batch"), "of two names": ("batch", "entries")}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", LENGTHS)
def test_a_mask_of_one_axis_is_read_for_an_open_batch(case, batch):
    """[batch], [2 · batch] and [3 · batch + 2] are told apart by the sizes that the model gets."""
    feeds, attrs = ATTENTION[case]
    if case != "lengths" and batch == "of one name":
        pytest.skip("the mask would be declared as long as the batch, which it is not")
    model, given = fused("Attention", feeds, attrs | {"num_heads": H})
    for value, dim in zip((model.graph.input[0], model.graph.input[3]), BATCHES[batch], strict=True):
        value.type.tensor_type.shape.dim[0].Clear()
        if dim:
            value.type.tensor_type.shape.dim[0].dim_param = dim
    found = normal_form(model)
    assert_same(run(model, given), run(found, given), atol=3e-6, rtol=1e-4)
    assert wrong_gradients(model, found, given, ["x", "w", "b"]) == []


def test_the_mask_that_embeddings_count_is_read_for_an_open_batch():
    """As onnxruntime.transformers.optimizer writes BERT: ``mask_index`` is known from EmbedLayerNormalization alone."""
    embed = ["ids", "kinds", "words", "places", "segments", "gamma", "beta", "mask"]
    nodes = [
        helper.make_node("EmbedLayerNormalization", embed, ["e", "index"], domain="com.microsoft"),
        helper.make_node("Attention", ["e", "w", "b", "index"], ["h"], domain="com.microsoft", num_heads=H),
        helper.make_node("SkipLayerNormalization", ["h", "e", "gamma", "beta"], ["n"], domain="com.microsoft"),
        helper.make_node("Attention", ["n", "w", "b", "index"], ["y"], domain="com.microsoft", num_heads=H),
    ]
    tables = {"words": real(9, HIDDEN), "places": real(5, HIDDEN, seed=1), "segments": real(2, HIDDEN, seed=2)}
    weights = tables | {"gamma": real(HIDDEN, seed=3), "beta": real(HIDDEN, seed=4)}
    weights |= {"w": real(HIDDEN, 3 * HIDDEN, seed=5), "b": real(3 * HIDDEN, seed=6)}
    open_sizes = {name: (np.int32, ["batch", "length"]) for name in ("ids", "kinds", "mask")}
    model = model_of(nodes, open_sizes | weights, opset=17, domains=MICROSOFT)
    found = normal_form(model)
    for rows, length in ((3, 4), (1, 5)):
        ids = np.arange(rows * length, dtype=np.int32).reshape(rows, length) % 9
        mask = (np.arange(length) < length - np.arange(rows)[:, None]).astype(np.int32)
        feeds = {"ids": ids, "kinds": ids % 2, "mask": mask} | weights
        assert_same(run(model, feeds), run(found, feeds), atol=3e-6, rtol=1e-4)
        assert wrong_gradients(model, found, feeds, list(weights)) == []


QKV = {"q": real(B, S, HIDDEN), "k": real(B, 4, HIDDEN, seed=1), "v": real(B, 4, H * 3, seed=2)}
ALIKE = {"q": real(B, S, HIDDEN), "k": real(B, S, HIDDEN, seed=1), "v": real(B, S, HIDDEN, seed=2)}
NO_BIAS = {"b": None}
QKV_BIAS = {"b": real(2 * HIDDEN + H * 3, seed=3)}
KEYS = {"m": np.array([[1, 1, 0, 1], [1, 1, 1, 1]], np.int32)}
CACHE = {"pk": real(B, H, 2, D, seed=5), "pv": real(B, H, 2, D, seed=6)}

HEADED = {
    "plain": (QKV, {}),
    "bias": (QKV | QKV_BIAS, {}),
    "scaled, causal": (ALIKE, {"scale": 0.4, "unidirectional": 1}),
    "keys": (QKV | NO_BIAS | KEYS, {}),
    "lengths": (QKV | NO_BIAS | {"m": np.array([3, 4], np.int32)}, {}),
    "lengths, and what only other runtimes read": (
        QKV | NO_BIAS | {"m": np.array([2, 4, 0, 3, 6, 0, 2, 6], np.int32)},
        {},
    ),
    "pairs": (QKV | NO_BIAS | {"m": np.array([[[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 1]]] * B, np.int32)}, {}),
    "added": (QKV | NO_BIAS | NO_MASK | {"a": real(B, 1, S, 4, seed=4)}, {}),
    "causal, more keys": (QKV, {"unidirectional": 1}),
    "causal, fewer keys": (QKV | {"q": real(B, 6, HIDDEN)}, {"unidirectional": 1}),
    "in heads": (QKV | {"k": real(B, H, 4, D, seed=1), "v": real(B, H, 4, D, seed=2)}, {}),
    "past": (ALIKE | NO_BIAS | NO_MASK | {"a": None} | CACHE, {}),
    "past, bias, causal": (
        ALIKE | {"b": real(3 * HIDDEN, seed=3)} | NO_MASK | {"a": None} | CACHE,
        {"unidirectional": 1},
    ),
}


@pytest.mark.parametrize("case", HEADED)
def test_multi_head_attention(case):
    feeds, attrs = HEADED[case]
    outputs = ["y", "present_k", "present_v"] if "past" in case else ["y"]
    check("MultiHeadAttention", feeds, attrs | {"num_heads": H}, outputs)


KEPT = {"pk": real(B, H, 6, D, seed=5), "pv": real(B, H, 6, D, seed=6)}
ONE = {n: x[:, :1] for n, x in ALIKE.items()}
PRESENT = ["y", "present_k", "present_v"]
BEAMS = {
    "none": None,
    "one sample": np.array([[[1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 0]]], np.int32),
    "one beam": np.zeros((B, 1, 6), np.int32),
}


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("held", [0, 2])
@pytest.mark.parametrize("beams", BEAMS)
@pytest.mark.parametrize("new", [ONE, ALIKE], ids=["one token", "three tokens"])
def test_past_and_present_in_one_buffer(new, beams, held, unidirectional):
    feeds = new | NO_BIAS | NO_MASK | {"a": None} | KEPT | {"n": np.array([held], np.int32), "beams": BEAMS[beams]}
    check("MultiHeadAttention", feeds, {"num_heads": H, "unidirectional": unidirectional}, PRESENT)


@pytest.mark.parametrize("beams", BEAMS)
def test_decoding_one_token(beams):
    mask = {"m": np.array([[1, 0, 1], [1, 1, 1]], np.int32), "a": None}
    feeds = ONE | mask | KEPT | {"n": np.array([2], np.int32)}
    if BEAMS[beams] is not None:
        width = np.array([BEAMS[beams].shape[1]], np.int32)
        feeds |= {"width": width, "beams": BEAMS[beams], "b": real(3 * HIDDEN, seed=3)}
    attrs = {"num_heads": H, "past_present_share_buffer": 1, "scale": 0.3}
    check("DecoderMaskedMultiHeadAttention", feeds, attrs, PRESENT)


def test_decoding_one_token_from_another_sequence():
    feeds = {"q": ONE["q"], "k": real(B, H, 5, D, seed=1), "v": real(B, H, 5, D, seed=2)}
    check("DecoderMaskedMultiHeadAttention", feeds, {"num_heads": H})


@pytest.mark.parametrize("unidirectional", [0, 1])
def test_scores_are_shown_before_the_softmax(unidirectional):
    feeds = ALIKE | NO_BIAS | {"m": np.array([[1, 0, 1], [1, 1, 1]], np.int32)}
    attrs = {"num_heads": H, "unidirectional": unidirectional}
    shapes = {"y": [B, S, HIDDEN], "scores": [B, H, S, S]}
    model, given = fused("MultiHeadAttention", feeds, attrs, ["y", "", "", "scores"], shapes)
    assert_same(run(model, given), run(normal_form(model), given), atol=3e-6)


def in_heads(x):
    return x.reshape(*x.shape[:2], H, -1)


def test_packed_queries_keys_and_values():
    """They are what they are apart (onnxruntime has no CPU kernel for them)."""
    apart = run(fused("MultiHeadAttention", ALIKE, {"num_heads": H})[0], ALIKE)
    heads = {n: in_heads(x) for n, x in ALIKE.items()}
    all_packed = {"q": np.stack([heads["q"], heads["k"], heads["v"]], 3)}
    keys_packed = {"q": ALIKE["q"], "k": np.stack([heads["k"], heads["v"]], 3)}
    for feeds in (all_packed, keys_packed):
        model, _ = fused("MultiHeadAttention", feeds, {"num_heads": H})
        assert_same(apart, run(normal_form(model), feeds))
        assert wrong_gradients(model, normal_form(model), feeds, list(feeds)) == []


def test_attention_without_bias_adds_none():
    """(onnxruntime's kernel reads the bias without asking whether there is one.)"""
    feeds = {n: MERGED[n] for n in ("x", "w")}
    zeros = MERGED | {"b": np.zeros(3 * HIDDEN, np.float32)}
    expected = run(fused("Attention", zeros, {"num_heads": H})[0], zeros)
    assert_same(expected, run(normal_form(fused("Attention", feeds, {"num_heads": H})[0]), feeds))


TABLES = {"cos": real(8, 2, seed=4), "sin": real(8, 2, seed=5)}
PLACES = {"i": np.array([[0, 3, 7], [2, 2, 1]])}

ROTARY = {
    "packed": ({"x": real(B, S, HIDDEN)} | PLACES | TABLES, {}),
    "heads": ({"x": real(B, H, S, D)} | PLACES | TABLES, {"interleaved": 1}),
    "one place": ({"x": real(B, S, HIDDEN), "i": np.array([2])} | TABLES, {"interleaved": 1}),
    "part": ({"x": real(B, S, H * 6)} | PLACES | TABLES, {"num_heads": H, "rotary_embedding_dim": 4}),
}


@pytest.mark.parametrize("case", ROTARY)
def test_rotary_embedding(case):
    check("RotaryEmbedding", *ROTARY[case])


def grouped(total, lengths, past=None, packed=False, size=8, **more):
    """Feeds of GroupQueryAttention: 4 heads of queries, 2 of keys and values."""
    new = total if past is None else total - past
    parts = [real(B, new, n * size, seed=n) for n in (4, 2, 3)]
    parts[2] = parts[2][..., : 2 * size]
    feeds = {"q": np.concatenate(parts, -1), "k": None, "v": None} if packed else dict(zip("qkv", parts, strict=True))
    kept = (None, None) if past is None else (real(B, 2, past, size, seed=7), real(B, 2, past, size, seed=8))
    feeds |= {"pk": kept[0], "pv": kept[1]}
    return feeds | {"n": np.array(lengths, np.int32) - 1, "t": np.array(total, np.int32)} | more


ANGLES = {"cos": real(8, 8, seed=4), "sin": real(8, 8, seed=5)}
BIASED = {"cos": None, "sin": None, "i": None, "a": real(1, 4, 3, 3, seed=9)}

SINKS = {"cos": None, "sin": None, "i": None, "a": None, "sink": real(4, seed=11)}


def with_room(feeds):
    """A cache that is longer than what it holds."""
    return feeds | {"pk": real(B, 2, 6, 8, seed=7), "pv": real(B, 2, 6, 8, seed=8)}


GROUPED = {
    "prompt": (grouped(3, [3, 3]), {}),
    "packed prompt": (grouped(3, [3, 3], packed=True), {}),
    "scaled, soft cap": (grouped(3, [3, 3]), {"scale": 0.5, "softcap": 2.0}),
    "window": (grouped(4, [4, 4]), {"local_window_size": 2}),
    "one more token": (grouped(4, [4, 4], past=3), {}),
    "one more token, uneven": (grouped(4, [4, 3], past=3), {}),
    "two more tokens": ({n: a if a is None or n == "t" else a[:1] for n, a in grouped(5, [5, 5], past=3).items()}, {}),
    "rotary prompt": (grouped(3, [3, 3], size=16, **ANGLES), {"do_rotary": 1}),
    "rotary, one more, uneven": (
        grouped(4, [4, 3], past=3, size=16, **ANGLES),
        {"do_rotary": 1, "rotary_interleaved": 1},
    ),
    "biased": (grouped(3, [3, 3], **BIASED), {}),
    "prompts of two lengths": (grouped(3, [3, 2]), {}),
    "to both sides": (grouped(3, [3, 2]), {"causal": 0}),
    "rotary prompt, placed": (
        grouped(3, [3, 3], size=16, **ANGLES, i=np.array([[2, 4, 1], [0, 1, 2]])),
        {"do_rotary": 1},
    ),
    "rotary, one more, placed": (
        grouped(4, [4, 3], past=3, size=16, **ANGLES, i=np.array([[1], [5]])),
        {"do_rotary": 1},
    ),
    "rotary, a part": (grouped(3, [3, 3], size=32, **ANGLES), {"do_rotary": 1}),
    "packed, rotary, one more": (grouped(4, [4, 4], past=3, size=16, packed=True, **ANGLES), {"do_rotary": 1}),
    "smooth": (grouped(3, [3, 3]), {"smooth_softmax": 1, "softcap": 2.0}),
    "sinks": (grouped(3, [3, 3], **SINKS), {}),
    "sinks, window, one more, uneven": (grouped(4, [4, 3], past=3, **SINKS), {"local_window_size": 2}),
    "sinks, smooth": (grouped(3, [3, 3], **SINKS), {"smooth_softmax": 1}),
    "a cache with room": (with_room(grouped(4, [4, 3], past=3)), {}),
}


@pytest.mark.sweep(0.23)
@pytest.mark.parametrize("case", GROUPED)
def test_group_query_attention(case):
    feeds, attrs = GROUPED[case]
    attrs = {"num_heads": 4, "kv_num_heads": 2, **attrs}
    model, given = fused("GroupQueryAttention", feeds, attrs, ["y", "present_k", "present_v"])
    found = normal_form(model)
    compared = (
        1 if "uneven" in case or "room" in case else 3
    )  # behind the last token of a shorter sample the caches hold anything
    assert_same(run(model, given)[:compared], run(found, given)[:compared], atol=3e-6, rtol=1e-4)
    assert wrong_gradients(model, found, given, [n for n, a in given.items() if a.dtype == np.float32]) == []


@pytest.mark.parametrize("more", [{}, SINKS | {"a": real(B, 1, S, S, seed=9)}], ids=["plain", "sinks, biased"])
@pytest.mark.parametrize("shown", [1, 2])
def test_scores_of_grouped_queries(shown, more):
    """1: what the softmax gets, behind the soft cap and the bias; 2: what it gives."""
    attrs = {"num_heads": 4, "kv_num_heads": 2, "softcap": 2.0, "qk_output": shown}
    check("GroupQueryAttention", grouped(S, [S, S], **more), attrs, [*PRESENT, "scores"])


def test_a_query_behind_the_end_that_sees_nothing_gives_zero():
    """(What onnxruntime writes there depends on the other options, and on what was in memory.)"""
    model, given = fused(
        "GroupQueryAttention", grouped(4, [4, 1]), {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 2}
    )
    found = normal_form(model)
    (expected,), (y,) = run(model, given), run(found, given)
    assert_same([expected[0], expected[1, :1]], [y[0], y[1, :1]], atol=3e-6)
    assert not y[1, 2:].any()
    assert wrong_gradients(model, found, given, ["q", "k", "v"]) == []


def held(total, capacity, window):
    """The rows that a sliding cache holds after so many tokens, as the operator's documentation has it."""
    leaving = capacity - window + 1
    return total if total <= capacity else total - leaving * -(-(total - capacity) // leaving)


# tokens before, new ones, rows of the cache, window, further inputs and attributes
SLIDING = {
    "filling up": ((3, 2), 1, 4, 3, {}, {}),
    "one leaves": ((9, 5), 1, 4, 4, {}, {"softcap": 2.0}),
    "some leave": ((9, 4), 1, 5, 2, {}, {"smooth_softmax": 1}),
    "several tokens": ((9,), 3, 4, 3, {}, {}),
    "more tokens than rows": ((9,), 6, 4, 3, SINKS, {}),
    "first prompt": ((0, 0), 3, 4, 3, {}, {}),
    "long first prompt": ((0, 0), 6, 4, 2, {}, {}),
    "biased": ((9,), 3, 4, 3, {"cos": None, "sin": None, "i": None, "a": real(1, 4, 3, 12, seed=9)}, {}),
    "rotary": ((6, 3), 1, 4, 3, ANGLES, {"do_rotary": 1}),
}


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("case", SLIDING)
def test_a_cache_that_slides(case):
    before, new, rows, window, more, attrs = SLIDING[case]
    batch, size = len(before), 16 if "rotary" in case else 8
    totals = [n + new for n in before]
    heads = dict(zip("qkv", (4, 2, 2), strict=True))
    feeds = {name: real(batch, new, n * size, seed=i) for i, (name, n) in enumerate(heads.items())}
    feeds |= {"pk": real(batch, 2, rows, size, seed=7), "pv": real(batch, 2, rows, size, seed=8)}
    feeds |= {"n": np.array(totals, np.int32) - 1, "t": np.array(max(totals), np.int32)} | more
    attrs = {"num_heads": 4, "kv_num_heads": 2, "sliding_window_cache": 1, "local_window_size": window, **attrs}
    model, given = fused("GroupQueryAttention", feeds, attrs, PRESENT)
    found = normal_form(model)
    (y, *caches), (mine, *my_caches) = run(model, given), run(found, given)
    assert_same([y], [mine], atol=3e-6)
    for theirs, ours in zip(caches, my_caches, strict=True):
        assert theirs.shape == ours.shape
        for sample, total in enumerate(totals):  # the other rows hold anything
            kept = held(total, rows, window)
            assert_same([theirs[sample, :, :kept]], [ours[sample, :, :kept]], atol=3e-6)
    assert wrong_gradients(model, found, given, [n for n, a in given.items() if a.dtype == np.float32]) == []


NO_ANGLES = {"cos": None, "sin": None, "i": None, "a": None, "sink": None}
NORMED = {"ks": None, "vs": None, "qn": real(16, seed=12), "kn": real(16, seed=13)}
EPSILONS = {
    "one for both": ({"qk_norm_epsilon": 1e-2}, (1e-2, 1e-2)),
    "its default": ({}, (1e-6, 1e-6)),
    "one each": ({"q_norm_epsilon": 0.5, "k_norm_epsilon": 1e-2}, (0.5, 1e-2)),
    "one of its own": ({"qk_norm_epsilon": 0.5, "k_norm_epsilon": 1e-2}, (0.5, 1e-2)),
}


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("rotary", [0, 1])
@pytest.mark.parametrize("case", EPSILONS)
def test_normalized_heads(case, rotary):
    """The CPU kernel of onnxruntime leaves the norms out, so numbers that are normalized by NumPy go without them."""
    epsilons, used = EPSILONS[case]
    angles = ANGLES | {"i": None, "a": None, "sink": None} if rotary else NO_ANGLES
    feeds = grouped(3, [3, 3], size=16, **angles)
    attrs = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": rotary}
    plain, _ = fused("GroupQueryAttention", feeds, attrs, PRESENT)
    model, given = fused("GroupQueryAttention", feeds | NORMED, attrs | epsilons, PRESENT)
    before = dict(given)
    for name, weight, epsilon in zip("qk", ("qn", "kn"), used, strict=True):
        heads = given[name].reshape(B, 3, -1, 16)
        rms = np.sqrt((heads**2).mean(-1, keepdims=True) + epsilon)
        before[name] = (heads / rms * given[weight]).reshape(given[name].shape).astype(np.float32)
    found = normal_form(model)
    assert_same(run(plain, {n: a for n, a in before.items() if n not in ("qn", "kn")}), run(found, given), atol=3e-6)
    assert wrong_gradients(found, found, given, [n for n, a in given.items() if a.dtype == np.float32]) == []


def test_a_cache_that_slides_and_is_left_out_is_a_window():
    """That is what a model for training makes of one that generates."""
    feeds, attrs = grouped(5, [5, 5]), {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 2}
    plain, given = fused("GroupQueryAttention", feeds, attrs)
    model, _ = fused("GroupQueryAttention", feeds, attrs | {"sliding_window_cache": 1})
    assert_same(run(plain, given), run(normal_form(model), given), atol=3e-6)


QUANTIZED = {"cos": None, "sin": None, "i": None, "a": None, "sink": None, "ks": real(1), "vs": real(1)}
OPTIONS = {
    "'fused'.*scores of a sliding cache": ({}, {"sliding_window_cache": 1, "local_window_size": 3}),
    "'fused'.*a sliding cache, but no cache or no window": ({}, {"sliding_window_cache": 1}),
    "'fused'.*a quantized cache": (QUANTIZED, {"k_quant_type": "PER_TENSOR"}),
    "'fused'.*queries of several lengths": (NO_ANGLES | NORMED | {"new": np.array([1, 1], np.int32)}, {}),
    "'fused'.*outputs its scores with qk_output=0": ({}, {}),
}


@pytest.mark.parametrize("message", OPTIONS)
def test_an_option_without_a_form_is_named(message):
    more, attrs = OPTIONS[message]
    feeds = grouped(4, [4, 4], past=3, **more)
    model, _ = fused("GroupQueryAttention", feeds, {"num_heads": 4, "kv_num_heads": 2, **attrs}, [*PRESENT, "scores"])
    with pytest.raises(ModelError, match=message):
        normal_form(model)


def test_beams_of_an_unknown_number_of_tokens_are_named():
    feeds = ONE | NO_BIAS | NO_MASK | {"a": None} | KEPT
    feeds |= {"n": np.array([2], np.int32), "beams": BEAMS["one sample"]}
    model, _ = fused("MultiHeadAttention", feeds, {"num_heads": H})
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "new"
    with pytest.raises(ModelError, match="a cache_indirection and an unknown number of new tokens"):
        normal_form(model)


@pytest.mark.parametrize("attrs", [{"do_rotary": 1}, {"past_present_share_buffer": 1}], ids=str)
def test_what_only_other_runtimes_run_is_named(attrs):
    model, _ = fused("Attention", MERGED, {"num_heads": H, **attrs})
    with pytest.raises(ModelError, match=r"'fused'.*(rotary embeddings of its own|shares the buffers)"):
        normal_form(model)

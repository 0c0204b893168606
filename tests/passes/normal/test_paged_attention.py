"""PagedAttention, which has only GPU kernels, beside GroupQueryAttention's CPU kernel for each sequence alone.

Options that this kernel has not are compared with a plain computation, token by token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from gradgraph.errors import ModelError
from tests.kit.differences import wrong_gradients
from tests.kit.small_models import assert_same, normal_form, real, run
from tests.passes.normal.test_contrib import fused, smooth

NEW, PAST = [3, 1, 4], [2, 0, 3]  # tokens of each sequence
ENDS = np.cumsum([0, *NEW]).astype(np.int32)
TOKENS, HEADS, GROUPS, SIZE, PAGE = sum(NEW), 4, 2, 32, 2
TABLE = np.array([[5, 0, 7, -1], [3, -1, -1, -1], [1, 8, 6, 2]], np.int32)  # of 9 pages, of which the last is not used
NAMES = ("q", "k", "v", "kc", "vc", "ends", "past", "table", "cos", "sin", "slots", "sink", "qn", "kn")


@dataclass(frozen=True)
class Case:
    rotary: str = ""
    packed: bool = False
    window: int = -1
    softcap: float = 0.0
    sink: bool = False
    norms: bool = False
    causal: bool = True
    latent: int = 0
    skipped: tuple[int, ...] = ()
    offset: int = 0
    by_slots: bool = False

    @property
    def attrs(self):
        given = {"num_heads": HEADS, "kv_num_heads": 1 if self.latent else GROUPS, "softcap": self.softcap}
        given |= {"do_rotary": bool(self.rotary), "rotary_interleaved": self.rotary == "interleaved"}
        given |= {"local_window_size": self.window, "is_causal": self.causal, "rotary_offset": self.offset}
        given |= {"kv_cache_layout": "LATENT", "v_head_size": self.latent, "scale": 0.3} if self.latent else {}
        return {name: int(x) if isinstance(x, bool) else x for name, x in given.items()}

    @property
    def feeds(self):
        groups, turned = 1 if self.latent else GROUPS, (SIZE - self.offset) // (1 if self.rotary != "half" else 2)
        angle = np.arange(10)[:, None] / np.arange(1, turned // 2 + 1)
        given = {
            name: real(TOKENS, n * SIZE, seed=i)
            for i, (name, n) in enumerate(zip("qkv", (HEADS, groups, groups), strict=True))
        }
        given |= {n: real(9, PAGE, groups, SIZE, seed=3 + i) for i, n in enumerate(("kc", "vc"))}
        given |= {"ends": ENDS, "past": np.array(PAST, np.int32), "table": TABLE}
        given |= {"cos": np.cos(angle), "sin": np.sin(angle)} if self.rotary else {}
        given |= {"sink": real(HEADS, seed=5)} if self.sink else {}
        given |= {"qn": real(SIZE, seed=6), "kn": real(SIZE, seed=7)} if self.norms else {}
        given |= {"slots": self.slots} if self.by_slots else {}
        if self.latent:
            del given["v"], given["vc"]
        if self.packed:
            given["q"] = np.concatenate([given.pop(n) for n in "qkv"], 1)
        return {n: self.typed(given.get(n)) for n in NAMES}

    @staticmethod
    def typed(x):
        return x if x is None or x.dtype == np.int32 else x.astype(np.float32)

    @property
    def slots(self):
        """The row of each token in the joined pages; −1 for those that are not stored."""
        rows = [TABLE[b, p // PAGE] * PAGE + p % PAGE for b in range(3) for p in range(PAST[b], PAST[b] + NEW[b])]
        return np.array([-1 if i in self.skipped else row for i, row in enumerate(rows)], np.int32)


def turned(x, position, case, feeds):
    """Rotate x [head size] by the angles of a position."""
    if not case.rotary:
        return x
    cos, sin = (feeds[n][position].astype(np.float64) for n in ("cos", "sin"))
    y, first, n = x.copy(), case.offset, len(cos)
    for i in range(n):
        a, b = (first + 2 * i, first + 2 * i + 1) if case.rotary == "interleaved" else (first + i, first + n + i)
        y[a], y[b] = x[a] * cos[i] - x[b] * sin[i], x[a] * sin[i] + x[b] * cos[i]
    return y


def normalised(x, weight):
    return x if weight is None else x / np.sqrt((x**2).mean() + 1e-6) * weight


def plainly(case):
    """Compute output and caches token by token in float64."""
    feeds = {n: x.astype(np.float64) if x is not None and x.dtype == np.float32 else x for n, x in case.feeds.items()}
    groups = 1 if case.latent else GROUPS
    q, k, v = feeds["q"], feeds["k"], feeds["v"]
    if case.packed:
        q, k, v = np.split(q, [HEADS * SIZE, (HEADS + groups) * SIZE], 1)
    own = [b for b in range(3) for _ in range(NEW[b])]
    at = [PAST[b] + i for b in range(3) for i in range(NEW[b])]
    caches = [None if c is None else c.reshape(-1, groups, SIZE).copy() for c in (feeds["kc"], feeds["vc"])]
    for t, row in enumerate(case.slots):
        if row >= 0:
            for g in range(groups):
                new = normalised(k[t].reshape(groups, SIZE)[g], feeds["kn"])
                caches[0][row, g] = turned(new, at[t], case, feeds)
                if not case.latent:
                    caches[1][row, g] = v[t].reshape(groups, SIZE)[g]
    y = np.zeros((TOKENS, HEADS, case.latent or SIZE))
    for t, h in itertools.product(range(TOKENS), range(HEADS)):
        query = turned(normalised(q[t].reshape(HEADS, SIZE)[h], feeds["qn"]), at[t], case, feeds)
        b, g = own[t], h * groups // HEADS
        end = at[t] + 1 if case.causal else PAST[b] + NEW[b]
        rows = [TABLE[b, p // PAGE] * PAGE + p % PAGE for p in range(end) if case.window < 0 or p > at[t] - case.window]
        scores = caches[0][rows, g] @ query * (0.3 if case.latent else 1 / np.sqrt(SIZE))
        scores = np.tanh(scores / case.softcap) * case.softcap if case.softcap else scores
        shares = np.exp(scores)
        shares /= shares.sum() + (np.exp(feeds["sink"][h]) if case.sink else 0)
        y[t, h] = shares @ (caches[0][rows, g][:, : case.latent] if case.latent else caches[1][rows, g])
    stored = [c.reshape(9, PAGE, groups, SIZE) for c in caches if c is not None]
    return [x.astype(np.float32) for x in (y.reshape(TOKENS, -1), *stored)]


CASES = {
    "plain": Case(),
    "packed, with rotary positions": Case(rotary="whole", packed=True),
    "half of each head rotated": Case(rotary="half", window=3),
    "interleaved, softcap": Case(rotary="interleaved", softcap=2.0),
    "sinks and a window": Case(sink=True, window=2),
    "norms": Case(rotary="whole", norms=True),
    "not causal": Case(causal=False),
    "not causal, with a window": Case(causal=False, window=2, sink=True),
    "latent": Case(latent=6, rotary="whole", offset=4),
    "latent, whole values": Case(latent=SIZE),
    "slots": Case(by_slots=True),
    "slots, some not stored": Case(by_slots=True, skipped=(1, 6), rotary="whole"),
}


# of a table of open width, how much of a head it rotates is unknown
BOTH = [(name, dynamic) for name in CASES for dynamic in (False, True) if CASES[name].rotary != "half" or not dynamic]


@pytest.mark.sweep(0.4)
@pytest.mark.parametrize(("name", "dynamic"), BOTH)
def test_output_caches_and_gradients(name, dynamic):
    case = CASES[name]
    outputs = ["y", "keys"] if case.latent else ["y", "keys", "values"]
    model, given = fused("PagedAttention", case.feeds, case.attrs, outputs, dynamic)
    found = normal_form(model)
    assert {o.domain for o in found.opset_import} == {""}
    assert_same(plainly(case), run(found, given), atol=1e-5, rtol=1e-4)
    assert wrong_gradients(model, found, given, smooth(given)) == []


@pytest.mark.parametrize("name", ["plain", "packed, with rotary positions", "half of each head rotated",
                                  "interleaved, softcap", "sinks and a window"])  # fmt: skip
def test_each_sequence_gets_what_grouped_attention_computes_for_it(name):
    case = CASES[name]
    feeds = case.feeds
    rows = []
    for b, (begin, end) in enumerate(itertools.pairwise(ENDS)):
        used = TABLE[b, : -(-(PAST[b] + NEW[b]) // PAGE)]
        past = [feeds[n][used].reshape(1, -1, GROUPS, SIZE)[:, : PAST[b]].transpose(0, 2, 1, 3) for n in ("kc", "vc")]
        own = {n: feeds[n] if feeds[n] is None else feeds[n][None, begin:end] for n in "qkv"}
        own |= {"pk": past[0].copy(), "pv": past[1].copy(), "last": np.array([PAST[b] + NEW[b] - 1], np.int32)}
        own |= {"total": np.array([PAST[b] + NEW[b]], np.int32), "cos": feeds["cos"], "sin": feeds["sin"]}
        own |= {"positions": None, "bias": None, "sink": feeds["sink"]}
        attrs = {n: x for n, x in case.attrs.items() if n not in ("is_causal", "rotary_offset")}
        rows.append(run(*fused("GroupQueryAttention", own, attrs, ["y", "keys", "values"]))[0][0])
    model, given = fused("PagedAttention", feeds, case.attrs, ["y", "keys", "values"])
    assert_same([np.concatenate(rows)], run(normal_form(model), given)[:1], atol=1e-5, rtol=1e-4)


def test_a_sequence_without_tokens_and_pages_with_nan_change_nothing():
    case = Case()
    feeds = case.feeds
    for cache in (feeds["kc"], feeds["vc"]):
        cache[[4, 8]] = np.nan  # no sequence stores tokens here; 8 belongs to the third, beyond its tokens
    feeds["table"] = np.concatenate([[[4, 4, 4, 4]], TABLE]).astype(np.int32)
    feeds["table"][3, 1], feeds["table"][3, 3] = 2, 8
    feeds["ends"], feeds["past"] = np.array([0, *ENDS], np.int32), np.array([0, *PAST], np.int32)
    model, given = fused("PagedAttention", feeds, case.attrs, ["y"])
    found = normal_form(model)
    assert all(np.isfinite(run(found, given)[0]).ravel())
    read = {n: x for n, x in given.items() if n not in ("kc", "vc")}
    assert wrong_gradients(model, found, given, smooth(read)) == []


def test_a_quantised_cache_is_refused():
    feeds = CASES["plain"].feeds | {"k_scale": np.ones(1, np.float32)}
    model, _ = fused("PagedAttention", feeds, Case().attrs | {"k_quant_type": "PER_TENSOR"})
    with pytest.raises(ModelError, match=r"'fused'.*has a quantized cache"):
        normal_form(model)

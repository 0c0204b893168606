"""Kept features: constants that are repeated for each sample; rows chosen by position and gradients are not kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.runtime.features.static_values import static_values
from tests.kit.small_models import parsed
from tests.runtime.test_keep_features import check_same_bits

RNG = np.random.default_rng(7)
WEIGHTS = {name: RNG.standard_normal(shape).astype(np.float32) * 0.4 for name, shape in
           {"a": (6, 6), "c": (6, 3), "table": (64, 6), "rows": (4, 6), "wide": (12, 6),
            "one": (1, 6)}.items()}  # fmt: skip
HEAD = "h = MatMul(q, a)  y = MatMul(h, c)"


def built(graph: str, **options: Any) -> gg.Step:
    return gg.build(parsed(graph, **WEIGHTS), loss="cross_entropy", optimizer="sgd", train="c", **options)


def keepable(step: gg.Step, rows: int) -> set[str | None]:
    return {x.name for x in static_values(step.train, step.manifest, {"x": (rows, 6)}).rows}


@pytest.mark.parametrize("body", [
    "p = Slice(table, zero, n, zero)  q = Add(x, p)",
    "r = Concat <axis = 0> (n, one_)  p = Tile(rows, r)  t = Slice(p, zero, n, zero)  q = Add(x, t)",
    "d = Sub(n, one_)  g = Concat <axis = 0> (zeros, d, zero)  p = Pad(one, g)  q = Add(x, p)",
    "e = Expand(one, s)  six_n = Concat <axis = 0> (six, n)  f = Reshape(e, six_n)  t = Transpose(f)  q = Add(x, t)",
])  # fmt: skip
def test_rows_of_a_constant_chosen_by_position(body: str) -> None:
    """Row i of the batch adds row i of a constant, so that its sum depends on the order of samples."""
    step = built(f"""(float[N, 6] x) => (float[N, 3] y)
        <int64[1] zero = {{0}}, int64[1] one_ = {{1}}, int64[1] six = {{6}}, int64[2] zeros = {{0, 0}}> {{
        s = Shape(x)  n = Gather(s, zero)  {body}  {HEAD}
    }}""")  # fmt: skip
    assert keepable(step, 8) & {"q", "h"} == set()
    x = RNG.standard_normal((20, 6)).astype(np.float32)
    check_same_bits(step, {"x": x, "target": RNG.integers(0, 3, 20)}, "auto")


@pytest.mark.parametrize("body", ["Concat <axis = 1> (x, rows)  h = MatMul(q, wide)",
                                  'Einsum <equation = "bi,bi->bi"> (x, rows)  h = MatMul(q, a)'])  # fmt: skip
def test_rows_of_a_constant_for_a_fixed_batch(body: str) -> None:
    step = built(f"(float[4, 6] x) => (float[4, 3] y) {{ q = {body}  y = MatMul(h, c) }}")
    assert keepable(step, 4) == {"x"}


@pytest.mark.parametrize("body", ["p = Expand(one, s)", "p = ConstantOfShape(s)",
                                  "r = Concat <axis = 0> (n, one_)  p = Tile(one, r)"])  # fmt: skip
def test_a_constant_repeated_for_each_sample(body: str) -> None:
    step = built(f"""(float[N, 6] x) => (float[N, 3] y) <int64[1] zero = {{0}}, int64[1] one_ = {{1}}> {{
        s = Shape(x)  n = Gather(s, zero)  {body}  j = Concat <axis = 1> (p, x)  q = MatMul(j, wide)  {HEAD}
    }}""")
    assert "h" in keepable(step, 8)
    check_same_bits(step, {"x": RNG.standard_normal((20, 6)).astype(np.float32), "target": RNG.integers(0, 3, 20)})


def test_the_initial_state_of_a_recurrent_layer() -> None:
    weights = {
        "w": RNG.standard_normal((1, 8, 3)),
        "r": RNG.standard_normal((1, 8, 2)),
        "c": RNG.standard_normal((2, 3)),
    }
    model = parsed("""(float[N, 6] x) => (float[N, 3] y)
        <int64[3] steps = {-1, 2, 3}, int64[1] zero = {0}, int64 first = {0}, int64[1] one = {1}, int64[1] two = {2}> {
        v = Reshape(x, steps)  t = Transpose <perm = [1, 0, 2]> (v)  s = Shape(v)  n = Gather(s, first)
        u = Unsqueeze(n, zero)  z = Concat <axis = 0> (one, u, two)  h0 = ConstantOfShape(z)
        q, h, g = LSTM <hidden_size = 2> (t, w, r, , , h0, h0)  last = Squeeze(h, zero)  y = MatMul(last, c)
    }""", **weights)  # fmt: skip
    step = gg.build(model, loss="cross_entropy", optimizer="sgd", train="c")
    assert "last" in keepable(step, 8)
    check_same_bits(step, {"x": RNG.standard_normal((20, 6)).astype(np.float32), "target": RNG.integers(0, 3, 20)})


def test_values_of_the_backward_pass_alone_are_not_kept() -> None:
    """The gradient of a trained scale reads normalised samples, which evaluation does not compute."""
    model = parsed("""(float[N, 6] x) => (float[N, 3] y) <int64[3] parts = {0, 2, 3}, int64[2] flat = {0, 6}> {
        h = MatMul(x, a)  p = Reshape(h, parts)  i = InstanceNormalization(p, scale, shift)  f = Reshape(i, flat)
        y = MatMul(f, c)
    }""", a=WEIGHTS["a"], c=WEIGHTS["c"], scale=np.ones(2), shift=np.zeros(2))  # fmt: skip
    step = gg.build(model, loss="cross_entropy", optimizer="sgd", train=["scale", "c"])
    check_same_bits(step, {"x": RNG.standard_normal((20, 6)).astype(np.float32), "target": RNG.integers(0, 3, 20)})


def test_types_that_numpy_lacks_are_not_kept() -> None:
    step = built(f"(float[N, 6] x) => (float[N, 3] y) {{ q = Tanh(x)  {HEAD} }}", precision="bfloat16")
    x = RNG.standard_normal((20, 6)).astype(np.float32)
    check_same_bits(step, {"x": x, "target": RNG.integers(0, 3, 20)}, "auto")


def test_a_kernel_that_computes_the_kept_value_and_the_next_one() -> None:
    """A native kernel of elementwise operators has both the kept sum and the sum after the cut as outputs."""
    step = built("""(float[N, 6] x) => (float[N, 3] y) <int64[1] zero = {0}, float[6] scale = {1, 1, 1, 1, 1, 1}> {
        u = MatMul(x, a)  v = Softmax(u)  k = Add(v, x)  s = Shape(k)  n = Gather(s, zero)
        p = Slice(table, zero, n, zero)  q = Add(k, p)  l = LayerNormalization(q, scale)  r = Add(l, k)
        y = MatMul(r, c)
    }""")
    check_same_bits(step, {"x": RNG.standard_normal((20, 6)).astype(np.float32), "target": RNG.integers(0, 3, 20)})

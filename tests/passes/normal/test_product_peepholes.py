"""The peepholes around products: what is left of each row, and that it gives the same numbers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from gradgraph.passes.normal import normalise
from gradgraph.passes.normal.simplifying import product_peepholes
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.passes.normal.simplifying.peepholes import REWRITES
from tests.kit.running import run

X = np.random.default_rng(0).uniform(-1.0, 1.0, (2, 3, 4, 5)).astype(np.float32)
HEAD = (
    "heads = Constant<value_ints=[6, 4, 5]>() back = Constant<value_ints=[2, 3, 5, 4]>() "
    "half = Constant<value_float=0.5>()"
)
SWAP, TURN = "Transpose<perm=[0, 1, 3, 2]>", "Transpose<perm=[0, 2, 1, 3]>"

# what is written, what is left
ROWS = {
    "keys as PyTorch exports them": (
        "f = Reshape(x, heads) t = Transpose<perm=[0, 2, 1]>(f) k = Reshape(t, back) y = MatMul(x, k)",
        "Transpose MatMul",
    ),
    "reshaped to something else": (
        "f = Reshape(x, heads) t = Transpose<perm=[1, 0, 2]>(f) k = Reshape(t, back) y = MatMul(x, k)",
        "Reshape Transpose Reshape MatMul",
    ),
    "a number times a swap": (f"t = {SWAP}(x) k = Mul(half, t) y = MatMul(x, k)", "Mul Transpose MatMul"),
    "a number times a swap that is read twice": (
        f"t = {SWAP}(x) k = Mul(half, t) z = MatMul(x, k) w = MatMul(x, t) y = Add(z, w)",
        "Transpose Mul MatMul MatMul Add",
    ),
    "a tensor times a swap": (f"t = {SWAP}(x) e = Exp(t) k = Mul(e, t) y = MatMul(x, k)", "Transpose Exp Mul MatMul"),
    "a swapped product of a swap": (
        f"e = Exp(x) t = {SWAP}(x) p = MatMul(t, e) s = {SWAP}(p) y = Sin(s)",
        "Exp Transpose MatMul Sin",
    ),
    "a swapped product of two swaps": (
        f"e = {SWAP}(x) t = Exp(x) p = MatMul(e, t) s = {SWAP}(p) q = MatMul(x, s) y = {SWAP}(q)",
        "Exp Transpose MatMul MatMul Transpose",
    ),
    "a swapped product of neither": (
        f"t = Exp(k0) p = MatMul(x, t) s = {SWAP}(p) y = Sin(s)",
        "Exp MatMul Transpose Sin",
    ),
    "a swapped product that is read twice": (
        f"t = {SWAP}(x) p = MatMul(x, t) s = {SWAP}(p) y = Mul(p, s)",
        "Transpose MatMul Transpose Mul",
    ),
    "a product turned otherwise": (f"t = {SWAP}(x) p = MatMul(x, t) y = {TURN}(p)", "Transpose MatMul Transpose"),
}


def model(body: str) -> ir.Model:
    return normalise(
        onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 21]> g (float[2, 3, 4, 5] x, float[2, 3, 5, 4] k0) => (float y) '
            f"{{ {HEAD} {body} }}"
        )
    )


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    body, left = ROWS[name]
    feeds = {"x": X, "k0": X.reshape(2, 3, 5, 4)}
    before = model(body)
    expected = run(ir.to_proto(before), feeds)["y"]
    after = clean_up(before)
    assert Counter(n.op_type for n in after.graph) == Counter(left.split())
    np.testing.assert_allclose(run(ir.to_proto(after), feeds)["y"], expected, rtol=1e-6, atol=1e-6)
    names = [n.name for n in after.graph]
    assert [n.name for n in clean_up(after).graph] == names  # idempotent


TWO, ONE = [[0, 2, 1, 3], [0, 1, 3, 2]], [[0, 2, 1, 3], [0, 2, 3, 1]]


@pytest.mark.parametrize(
    ("rest", "left"),
    [("y = MatMul(u, t)", TWO), ("z = Sin(t) p = MatMul(u, t) q = MatMul(u, z) y = Add(p, q)", ONE)],
    ids=["a factor only", "for others, too"],
)
def test_swaps_of_factors_stay_swaps(rest: str, left: list[list[int]]) -> None:
    """There onnxruntime fuses them into the product, and others turn ``x`` likewise."""
    after = clean_up(model(f"u = {TURN}(x) t = {SWAP}(u) {rest}"))
    assert [list(n.attributes["perm"].as_ints()) for n in after.graph if n.op_type == "Transpose"] == left


def test_every_row_of_the_table_is_tried() -> None:
    own = {
        kind for kind, rewrites in REWRITES.items() if any(r.__module__ == product_peepholes.__name__ for r in rewrites)
    }
    assert own == {"Reshape", "Mul", "Transpose"}

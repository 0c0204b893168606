"""What bodies declare of the tensors that enter them, and of what they give: lies change no gradient."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.errors import ModelError
from tests.kit.running import run

X = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4)
FEEDS = {"x": X, "xs": np.stack([X, X * 0.5]), "flag": np.array(True)}
LOOP = """{y} = Loop <body = {name} (int64 {name}i, bool {name}c, float{shape} {name}s) => (bool {name}d,
    float{shape} {name}t) {{ {name}d = Identity({name}c) {inner} }}> (two, , {x})"""
STEP = "{y}u = Mul({x}, w) {y} = Tanh({y}u)"


def loop(name: str, x: str, y: str, shape: str, inner: str = "") -> str:
    """Two iterations of ``STEP``, or of other nodes that read ``<name>s`` and give ``<name>t``."""
    inner = inner or STEP.format(x=f"{name}s", y=f"{name}t")
    return LOOP.format(name=name, x=x, y=y, shape=shape, inner=inner)


def branches(shape: str, x: str = "x", y: str = "a", then: str = "") -> str:
    return f"""{y} = If (flag) <then_branch = p () => (float{shape} t) {{ {then or STEP.format(x=x, y="t")} }},
        else_branch = q () => (float{shape} e) {{ e = Mul({x}, w) }}>"""


SCAN = """b, rows = Scan <num_scan_inputs = 1, scan_input_axes = [{axis}], body = b (float{shape} s, float{shape} e)
    => (float{shape} t, float{shape} v) {{ u = Mul(s, w) h = Tanh(u) t = Add(h, e) v = Mul(t, w) }}> (x, {xs})
    c = ReduceSum <keepdims = 0> (rows) a = Add(b, c)"""


def bodies(shape: str) -> dict[str, str]:
    inner = loop("i", "os", "ot", shape)
    return {
        "Loop": loop("b", "x", "a", shape),
        "Scan": SCAN.format(shape=shape, axis=0, xs="xs"),
        "Scan along the last axis": "l = Transpose <perm = [1, 2, 0]> (xs)" + SCAN.format(shape=shape, axis=-1, xs="l"),
        "If": branches(shape),
        "Loop in a Loop": loop("o", "x", "a", shape, inner),
        "Loop in an If": branches(shape, then=loop("b", "x", "t", shape)),
        "If in a Loop": loop("b", "x", "a", shape, branches(shape, "bs", "bt")),
        "Scan in a Loop": loop("b", "x", "a", shape, f"""bt = Scan <num_scan_inputs = 1, body = k (float{shape} ks,
            float{shape} ke) => (float{shape} kt) {{ kh = Mul(ks, w) kt = Add(kh, ke) }}> (bs, xs)"""),
        "Loop behind a Loop": loop("b", "x", "m", shape) + loop("c", "m", "a", shape),
        "a state that is computed": "n = Neg(x)" + loop("b", "n", "a", shape),
        "a state that grows": "k = ReduceSum <keepdims = 0> (x)" + loop("b", "k", "a", shape),
    }  # fmt: skip


def model(name: str, shape: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[3, 4] x, float[2, 3, 4] xs, bool flag) => (float y)
        <float[4] w = {{0.5, -0.7, 0.3, 0.9}}, int64 two = {{2}}>
        {{ {bodies(shape)[name]} s = Mul(a, a) y = ReduceSum <keepdims = 0> (s) }}""")


def gradients(name: str, shape: str, x: np.ndarray = X) -> dict[str, np.ndarray]:
    gradient = gg.value_and_grad(model(name, shape), output="y", wrt=["x", "w"])
    read = {i.name for i in gradient.graph.input}
    return run(gradient, {name: a for name, a in {**FEEDS, "x": x}.items() if name in read})


def runs(name: str, shape: str) -> bool:
    """Does onnxruntime take the file?"""
    try:
        run(model(name, shape), FEEDS)
    except Exception:  # whatever it says
        return False
    return True


TRUE = {name: "[]" if name == "a state that grows" else "[3, 4]" for name in bodies("")}
LIES = {
    "nothing": "[]",
    "a scalar": "",
    "fewer axes": "[4]",
    "more axes": "[1, 3, 4]",
    "one number": "[1]",
    "other sizes": "[1, 1]",
    "one other size": "[3, 1]",
    "another first size": "[1, 4]",
    "sizes that do not go with the weight": "[4, 3]",
    "a name": "[batch, 4]",
}
REFUSED = {
    ("Loop in a Loop", "[4, 3]"),
    ("Loop behind a Loop", "[4, 3]"),
    ("Scan in a Loop", "[4, 3]"),
}  # before it is known what enters


@pytest.mark.sweep(0.08)
@pytest.mark.parametrize("shape", LIES.values(), ids=list(LIES))
@pytest.mark.parametrize("name", bodies(""))
def test_lies_about_bodies_change_no_gradient(name: str, shape: str) -> None:
    expected = gradients(name, TRUE[name])
    try:
        found = gradients(name, shape)
    except ModelError as refused:
        assert "do not broadcast" in str(refused) and (name, shape) in REFUSED
        return
    except Exception:
        assert not runs(name, shape)
        return
    assert {n: a.shape for n, a in found.items()} == {n: a.shape for n, a in expected.items()}
    assert found["w.grad"].shape == (4,) and found["x.grad"].shape == (3, 4)
    for output, value in expected.items():
        np.testing.assert_allclose(found[output], value, rtol=1e-5, err_msg=output)


@pytest.mark.sweep(0.66)
@pytest.mark.parametrize("name", bodies(""))
def test_what_is_declared_truly_is_right(name: str) -> None:
    """The judge of the test above, against central differences."""
    found = gradients(name, TRUE[name])
    for wrt, value in (("x", X), ("w", np.array([0.5, -0.7, 0.3, 0.9], np.float32))):
        assert found[f"{wrt}.grad"].shape == value.shape
    step, direction = 1e-2, np.random.default_rng(0).normal(size=X.shape).astype(np.float32)
    ahead, behind = (gradients(name, TRUE[name], X + d)["y"] for d in (step * direction, -step * direction))
    slope = float((found["x.grad"] * direction).sum())
    assert float(ahead - behind) / (2 * step) == pytest.approx(slope, rel=5e-3, abs=5e-3)

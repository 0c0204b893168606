"""GroupNormalization as it is written: with the digits that ONNX's own body loses."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from tests.kit.running import Loop, run

RNG = np.random.default_rng(0)
SCALE, BIAS = RNG.uniform(0.5, 2.0, (2, 4)).astype(np.float32)

TOLERANCE = {"float": 3e-4, "float16": 1e-2, "double": 1e-8}  # half a unit of float32 at 100 is 4e-6


def model(dtype: str, shape: str) -> onnx.ModelProto:
    text = f"""<ir_version: 10, opset_import: ["": 21]> g ({dtype}[{shape}] x, {dtype}[4] s, {dtype}[4] b) =>
    ({dtype}[{shape}] y) {{ y = GroupNormalization<num_groups = 2>(x, s, b) }}"""
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize("dtype", ["float", "float16", "double"])
@pytest.mark.parametrize(("shape", "size"), [("n, 4", (3, 4)), ("n, 4, h, 5", (3, 4, 2, 5))])
def test_values(dtype: str, shape: str, size: tuple[int, ...]) -> None:
    kind = onnx.helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, dtype.upper()))
    mean = {"float": 100, "float16": 0, "double": 1000}[dtype]  # E[x²] − E[x]² has few digits left, or none
    x = (mean + RNG.normal(size=size)).astype(kind)
    wide = x.astype(np.float64).reshape(size[0], 2, -1)
    normal = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    vector = (1, 4, *(1 for _ in size[2:]))
    expected = normal.reshape(size) * SCALE.reshape(vector) + BIAS.reshape(vector)
    feeds = {"x": x, "s": SCALE.astype(kind), "b": BIAS.astype(kind), "y.cotangent": np.zeros(size, kind)}
    found = run(gg.vjp(model(dtype, shape), outputs=["y"], wrt=["x"]), feeds)["y"]
    assert found.dtype == kind
    np.testing.assert_allclose(found, expected, atol=TOLERANCE[dtype])


def test_a_step_trains_and_evaluates_with_these_digits() -> None:
    whole = model("float", "n, 4, 6")
    for name, vector in (("s", SCALE), ("b", BIAS)):
        whole.graph.initializer.append(onnx.numpy_helper.from_array(vector, name))
    del whole.graph.input[1:]
    loop = Loop(gg.build(whole, "mse", gg.optim.sgd(0.0)))
    x = (1000 + RNG.normal(size=(2, 4, 6))).astype(np.float32)
    target = np.zeros((2, 4, 6), np.float32)
    wide = x.astype(np.float64).reshape(2, 2, -1)
    normal = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    loss = ((normal.reshape(2, 4, 6) * SCALE[:, None] + BIAS[:, None]) ** 2).mean()
    feeds = {"x": x, "target": target}
    np.testing.assert_allclose(loop.evaluate(feeds)["loss"], loss, rtol=1e-4)
    np.testing.assert_allclose(loop(feeds)["loss"], loss, rtol=1e-4)

"""Half precision: gradients have the type of their tensor, run in onnxruntime and agree with those in float32."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph import frontend
from gradgraph.errors import BuildError, ModelError
from gradgraph.frontend import nn
from gradgraph.passes.normal import normalise
from tests.kit.running import run, session

BFLOAT16 = ml_dtypes.bfloat16
HALVES = {"float16": (np.float16, 2e-3), "bfloat16": (BFLOAT16, 1e-2)}  # with half a dozen roundings' room
FLOATING = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def bits(array: np.ndarray) -> ort.OrtValue:
    """Any array as onnxruntime takes it: the small floats of ml_dtypes travel as bits."""
    onnx_type = helper.np_dtype_to_tensor_dtype(array.dtype)
    plain = array.view(np.uint16) if array.dtype == BFLOAT16 else array
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(plain), onnx_type)


def array(value: ort.OrtValue) -> np.ndarray:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(raw, BFLOAT16).reshape(value.shape())


def run_typed(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs by name, bfloat16 included."""
    s = session(model)
    names = [o.name for o in s.get_outputs()]
    values = s.run_with_ort_values(names, {k: bits(v) for k, v in feeds.items()})
    return {name: array(v) for name, v in zip(names, values, strict=True)}


def retyped(model: onnx.ModelProto, dtype: Any) -> onnx.ModelProto:
    """A copy in which every floating tensor has another type."""
    to = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in (*copy.graph.input, *copy.graph.output, *copy.graph.value_info):
        if value.type.tensor_type.elem_type in FLOATING:
            value.type.tensor_type.elem_type = to
    attributes = [a.t for n in copy.graph.node for a in n.attribute if a.type == onnx.AttributeProto.TENSOR]
    for tensor in (*copy.graph.initializer, *attributes):
        if tensor.data_type in FLOATING:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))
    return copy


class Scored(nn.Module):
    """The mean of squares: a sum of positive terms, in which nothing cancels."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any) -> Any:
        y = self.net(x)
        return (y * y).mean()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def convolutional() -> nn.Module:
    first = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, stride=2)]
    return nn.Sequential(
        *first, nn.Conv2d(8, 8, 3, stride=2), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 4)
    )


def attention() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0), nn.Linear(16, 2))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "perceptron": (perceptron, ("batch", 16)),
    "convolutional": (convolutional, ("batch", 3, 11, 11)),
    "attention": (attention, ("batch", 6, 16)),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_agree_with_float32(name: str, half: str) -> None:
    dtype, tolerance = HALVES[half]
    frontend.manual_seed(0)
    build, shape = NETWORKS[name]
    model = frontend.export(Scored(build()), {"x": shape})
    small = retyped(model, dtype)
    x = np.random.default_rng(0).normal(size=(4, *shape[1:])).astype(dtype)
    wide = retyped(small, np.float32)  # the same numbers: what differs is arithmetic
    expected = run(gg.value_and_grad(wide, wrt=["*"]), {"x": x.astype(np.float32)})
    gradient = gg.value_and_grad(small, wrt=["*"])
    onnx.checker.check_model(gradient, full_check=True)
    found = run_typed(gradient, {"x": x})
    assert list(found) == list(expected)
    for key, e in expected.items():
        assert found[key].dtype == dtype
        error = np.abs(found[key].astype(np.float32) - e).max() / np.abs(e).max()
        assert error < tolerance, key


# --- bfloat16: stored narrow, computed wide ------------------------------------------------------------


def test_other_transforms_of_a_bfloat16_model() -> None:
    frontend.manual_seed(0)
    model = retyped(frontend.export(Scored(perceptron()), {"x": ("n", 16)}), BFLOAT16)
    x, t = np.random.default_rng(0).normal(size=(2, 3, 16)).astype(BFLOAT16)
    tangent = run_typed(gg.jvp(model, wrt="x"), {"x": x, "x.tangent": t})["output.tangent"]
    gradient = run_typed(gg.value_and_grad(model, wrt="x"), {"x": x})["x.grad"]
    assert tangent.dtype == BFLOAT16
    slope = (gradient.astype(np.float32) * t.astype(np.float32)).sum()
    np.testing.assert_allclose(tangent.astype(np.float32), slope, rtol=2e-2)
    curved = gg.hvp(model, wrt="x")
    assert run_typed(curved, {"x": x, "x.tangent": t})["x.hvp"].dtype == BFLOAT16


def graph_model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 22]> g {text}')


# the bits of 1, 2, 3 and of 2
MIXED = """
(bfloat16[n, 3] x, bool go) => (bfloat16[n, 3] y, float[n, 3] z, bfloat16[n, 3] x)
<bfloat16[3] w = {16256, 16384, 16448}>
{
  c = Constant <value = bfloat16[1] {16384}> ()
  a = Mul(x, w)
  b = Mul(a, c)
  s = If (go) <
    then_branch = t () => (bfloat16[n, 3] p) { p = Exp(b) },
    else_branch = e () => (bfloat16[n, 3] q) { f = Cast <to = 1> (b) r = Sin(f) q = Cast <to = 16> (r) }
  >
  y = Add(s, a)
  z = Cast <to = 1> (y)
}
"""


def test_normal_form_casts_at_the_border_and_in_branches() -> None:
    model = ir.to_proto(normalise(ir.from_proto(graph_model(MIXED))))
    onnx.checker.check_model(model, full_check=True)
    assert [v.type.tensor_type.elem_type for v in model.graph.output] == [16, 1, 16]
    assert ir.to_proto(normalise(ir.from_proto(model))) == model  # once is enough
    x = np.array([[0.5, -1.0, 0.25]], BFLOAT16)
    w = np.array([1.0, 2.0, 3.0])
    for go, f in ((True, np.exp), (False, np.sin)):
        found = run_typed(model, {"x": x, "go": np.array(go)})
        expected = f(2 * w * x.astype(np.float64)) + w * x.astype(np.float64)
        np.testing.assert_allclose(found["y"].astype(np.float64), expected, rtol=2**-7)
        np.testing.assert_allclose(found["z"], expected, rtol=2**-7)
        assert found["x"].dtype == BFLOAT16


def test_gradients_pass_the_casts() -> None:
    gradient = gg.vjp(graph_model(MIXED), outputs="y", wrt=["x", "w"])
    x = np.array([[0.5, -1.0, 0.25]], BFLOAT16)
    feeds = {"x": x, "go": np.array(True), "y.cotangent": np.ones((1, 3), BFLOAT16)}
    found = run_typed(gradient, feeds)
    w = np.array([1.0, 2.0, 3.0])
    slope = 2 * np.exp(2 * w * x.astype(np.float64)) + 1
    assert found["x.grad"].dtype == found["w.grad"].dtype == BFLOAT16
    np.testing.assert_allclose(found["x.grad"].astype(np.float64), slope * w, rtol=2**-7)
    np.testing.assert_allclose(found["w.grad"].astype(np.float64), (slope * x.astype(np.float64))[0], rtol=2**-7)


def test_running_statistics_in_bfloat16_are_not_trained() -> None:
    model = retyped(frontend.export(Scored(convolutional()), {"x": (2, 3, 11, 11)}), BFLOAT16)
    names = [o.name for o in gg.value_and_grad(model).graph.output]
    assert not [name for name in names if "running" in name]


def test_bfloat16_weights_are_not_trained() -> None:
    model = retyped(frontend.export(Scored(convolutional()), {"x": (2, 3, 11, 11)}), BFLOAT16)
    with pytest.raises(BuildError, match="is bfloat16"):
        gg.build(model, loss=None)


def test_sequences_of_bfloat16_are_refused() -> None:
    model = graph_model("(seq(bfloat16[n]) s, int64 i) => (bfloat16[n] y) { e = SequenceAt(s, i) y = Neg(e) }")
    with pytest.raises(ModelError, match="sequence or optional of bfloat16"):
        gg.vjp(model, wrt="s")


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_what_a_norm_gives_has_a_type_where_onnx_infers_none(dtype: str) -> None:
    """Of a GroupNormalization between other nodes, ONNX's inference tells neither shape nor type."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({dtype}[2, 4, 5] x, {dtype}[4] s, {dtype}[4] b) => '
        f"({dtype}[2, 4, 5] y)"
        " { c = GroupNormalization<num_groups = 2>(x, s, b)  y = Add(c, x) }"
    )
    rng = np.random.default_rng(0)
    whole = gg.jvp(model, wrt=["x"])
    assert isinstance(whole, onnx.ModelProto)
    feeds = {"x": (2, 4, 5), "s": (4,), "b": (4,), "x.tangent": (2, 4, 5)}
    drawn = {name: rng.normal(size=size) for name, size in feeds.items()}
    kind = np.float16 if dtype == "float16" else np.float32
    found = run(whole, {name: x.astype(kind) for name, x in drawn.items()})["y.tangent"]
    x = drawn["x"].reshape(2, 2, 10)
    t = drawn["x.tangent"].reshape(2, 2, 10)
    centred, moved = x - x.mean(-1, keepdims=True), t - t.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    normal = centred / deviation
    pushed = (moved - normal * (normal * moved).mean(-1, keepdims=True)) / deviation
    wanted = pushed.reshape(2, 4, 5) * drawn["s"][:, None] + drawn["x.tangent"]
    assert found.dtype == kind
    tolerance = 1e-2 if dtype == "float16" else 1e-5
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def test_element_types_are_known_behind_two_norms() -> None:
    """The second norm's is known only when ONNX has inferred again what lies behind the first."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n, 4, 5] x, float[4] s, float[4] b, float[4, 4, 1] w) => '
        "(float[n, 4, 5] y) { c = GroupNormalization<num_groups = 2>(x, s, b) d = Add(c, x) e = Conv(d, w)"
        " f = GroupNormalization<num_groups = 2>(e, s, b) y = Relu(f) }"
    )
    gg.vjp(model, outputs=["y"], wrt=["x", "w"])

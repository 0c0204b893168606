"""A scale and a shift of channels that no module has a name for: a note says that they are trained."""

from __future__ import annotations

import onnx
import onnx.parser
import pytest

import gradgraph as gg


def model(body: str, scale: str = "float[1, 4, 1, 1] s", shift: str = "float[4, 1, 1] t") -> onnx.ModelProto:
    numbers = "{1, 2, 3, 4}"
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>'
        "net (float[batch, 2, 5, 5] x) => (float[batch, 4, 5, 5] y)"
        f"<float[4, 2, 1, 1] w = {{1, 2, 3, 4, 5, 6, 7, 8}}, float[4] b = {numbers},"
        f" {scale} = {numbers}, {shift} = {numbers}> {{ {body} }}"
    )


def notes(step: gg.Step) -> list[str]:
    return [str(f) for f in step.findings if "FrozenBatchNorm" in str(f)]


@pytest.mark.parametrize(
    "body",
    [
        "c = Conv(x, w) m = Mul(c, s) y = Add(m, t)",
        "c = Conv(x, w) m = Mul(s, c) a = Add(t, m) y = Relu(a)",
    ],
)
def test_named(body: str) -> None:
    step = gg.build(model(body), "mse")
    assert set(step.manifest.trainable) == {"w", "s", "t"}
    (note,) = notes(step)
    assert note.startswith("the tensors 's', 't' are trained")


@pytest.mark.parametrize(
    "body",
    [
        "c = Conv(x, w, b) m = Mul(c, s) y = Add(m, t)",  # a bias has its place before the scale
        "c = Conv(x, w) r = Relu(c) m = Mul(r, s) y = Add(m, t)",  # a norm stands before its activation
        "c = Conv(x, w) m = Mul(c, s) a = Add(m, t) n = Mul(a, s) y = Add(n, t)",  # shared
        "c = Conv(x, w) m = Mul(c, s) y = Sub(m, t)",
        "c = Conv(x, w) m = Mul(c, s) y = Add(m, c)",
    ],
)
def test_not_named(body: str) -> None:
    assert not notes(gg.build(model(body), "mse"))


def test_numbers_along_rows_are_of_no_channel() -> None:
    along = model("c = Conv(x, w) m = Mul(c, s) y = Add(m, t)", scale="float[4, 1] s", shift="float[4, 1] t")
    along.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 4
    along.graph.output[0].type.tensor_type.shape.dim[2].dim_value = 4
    assert not notes(gg.build(along, "mse"))


def test_who_chose_is_not_told() -> None:
    body = "c = Conv(x, w) m = Mul(c, s) y = Add(m, t)"
    assert not notes(gg.build(model(body), "mse", train=["w", "s"]))
    assert not notes(gg.build(model(body), "mse", freeze=["s", "t"]))

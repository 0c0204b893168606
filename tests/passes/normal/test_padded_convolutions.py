"""A Pad with zeros before a Conv becomes part of its pads, and no other Pad does."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

from tests.kit.small_models import assert_same, normal_form, op_types, parsed, real, run

X, W = real(2, 3, 9), real(4, 3, 3)


def convolved(
    pad: str, *, conv: str = "group = 1", more: str = "", outputs: str = "float[a, b, c] y"
) -> onnx.ModelProto:
    """Return a Conv of a sequence after ``p = …`` in ONNX's text form."""
    body = f"one = Constant<value_float = 1.0>() {pad} y = Conv<{conv}>(p, w) {more}"
    return parsed(f"(float[n, 3, 9] x) => ({outputs}) {{ {body} }}", w=W)


def pads(*numbers: int) -> str:
    """Return nodes that pad the last axis with zeros."""
    return f"s = Constant<value_ints = [0, 0, {numbers[0]}, 0, 0, {numbers[1]}]>() p = Pad(x, s)"


@pytest.mark.parametrize("conv", ["group = 1", "dilations = [2]", "strides = [2], pads = [0, 1]"])
@pytest.mark.parametrize("pad", [(2, 0), (1, 1), (0, 1)], ids=str)
def test_zeros_become_pads(pad: tuple[int, int], conv: str) -> None:
    model = convolved(pads(*pad), conv=conv)
    found = normal_form(model)
    assert op_types(found) == ["Conv"]
    assert_same(run(model, {"x": X}), run(found, {"x": X}), rtol=1e-5)


def test_axes_may_be_given() -> None:
    pad = "s = Constant<value_ints = [2, 1]>() a = Constant<value_ints = [-1]>() p = Pad(x, s, , a)"
    model = convolved(pad)
    found = normal_form(model)
    assert op_types(found) == ["Conv"]
    assert_same(run(model, {"x": X}), run(found, {"x": X}), rtol=1e-5)


OTHERS: dict[str, dict[str, Any]] = {
    "other numbers": {"pad": "s = Constant<value_ints = [0, 0, 1, 0, 0, 1]>() p = Pad(x, s, one)"},
    "another mode": {"pad": 's = Constant<value_ints = [0, 0, 1, 0, 0, 1]>() p = Pad<mode = "edge">(x, s)'},
    "images cropped": {"pad": pads(2, -1)},
    "channels padded": {
        "pad": "i = Constant<value_ints = [0, 1]>() q = Gather<axis = 1>(x, i) "
        "s = Constant<value_ints = [0, 1, 1, 0, 0, 1]>() p = Pad(q, s)"
    },
    "a window in the padding": {"pad": pads(3, 0)},
    "another reader": {"pad": pads(1, 1), "more": "z = Abs(p)", "outputs": "float[a, b, c] y, float[a, b, d] z"},
    "an output": {"pad": pads(1, 1), "outputs": "float[a, b, c] y, float[a, b, d] p"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_pads_remain(name: str) -> None:
    model = convolved(**OTHERS[name])
    found = normal_form(model)
    assert "Pad" in op_types(found)
    assert_same(run(model, {"x": X}), run(found, {"x": X}), rtol=1e-5)

"""`check` names what discards values that are not finite, where a gradient is NaN for it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import gradgraph as gg
from tests.kit.small_models import parsed

WORDS = "non-finite values"


def where(computed: str, discarded_first: bool = False) -> onnx.ModelProto:
    lanes = "z, r" if discarded_first else "r, z"
    condition = "LessOrEqual" if discarded_first else "Greater"
    return parsed(
        f"""(float[n, 4] x) => (float[n, 4] y) {{
            z = Constant<value_float=0.0>()
            h = Mul(x, w)
            c = {condition}(h, z)
            {computed}
            y = Where(c, {lanes})
        }}""",
        w=np.array([1.0, -2.0, 0.5, 3.0]),
    )


@pytest.mark.parametrize("discarded_first", [False, True])
@pytest.mark.parametrize(
    "computed", ["r = Sqrt(h)", "e = Constant<value_float=0.5>() r = Pow(h, e)", "s = Sqrt(h) r = Mul(s, h)"]
)
def test_a_discarding_node_is_named(computed: str, discarded_first: bool) -> None:
    report = gg.check_gradients(where(computed, discarded_first))
    assert not report.ok
    (finding,) = report.findings
    assert "(Where) discards" in str(finding) and WORDS in str(finding)


@pytest.mark.parametrize(
    "computed", ["r = Exp(h)", "g = Max(h, z) o = Constant<value_float=1.0>() p = Add(g, o) r = Log(p)"]
)
def test_a_node_that_discards_finite_values_is_not(computed: str) -> None:
    report = gg.check_gradients(where(computed))
    assert report.ok
    assert report.findings == ()


def test_the_advice_helps() -> None:
    report = gg.check_gradients(where("o = Constant<value_float=1.0>() s = Where(c, h, o) r = Sqrt(s)"))
    assert report.ok
    assert report.findings == ()

"""Every form of the lowering tables gives what the portable form gives; every rule survives lowering."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import gradgraph.rules.families  # noqa: F401  (fills the registry)
from gradgraph.backends.engine import lower
from gradgraph.backends.forms import Form
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.files.models import to_proto
from gradgraph.rules.named_operators import DOMAIN, OPERATORS
from gradgraph.rules.registry import RULES, Case, Rule, case, real
from tests.kit.form_kit import gradient_of, lowered_with, one_call, problems_of_form, problems_of_rule
from tests.kit.running import run

FORMS = [pytest.param(f, id=f"{f.op_type}-{f.name}") for f in ORT_CPU.lowering.forms]
CASES = [
    pytest.param(r, c, id=f"{r.op_type}-{i}")
    for r in RULES.values()
    for i, c in enumerate(r.cases)
    if not c.onnxruntime
]


@pytest.mark.sweep(0.12)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_equals_the_portable_one(form: Form) -> None:
    assert problems_of_form(ORT_CPU, form) == []


@pytest.mark.parametrize("form", [f for f in FORMS if f.values[0].domain == ""])
def test_a_form_of_a_standard_operator_accepts_inputs_of_unknown_rank(form: Form) -> None:
    """Results of loops may have one."""
    for one in form.cases:
        model, _ = one_call(form.domain, form.op_type, one, unknown=False)
        for i in range(len(model.graph.inputs)):
            unknown = model.clone()
            for value in (unknown.graph.inputs[i], *(y for node in unknown.graph for y in node.outputs)):
                value.shape = None
            lowered_with(unknown, ORT_CPU, form)


@pytest.mark.sweep(0.001)
@pytest.mark.parametrize(("rule", "case"), CASES)
def test_a_lowered_rule_equals_the_portable_one(rule: Rule, case: Case) -> None:
    assert problems_of_rule(rule, case, ORT_CPU) == []
    assert problems_of_rule(rule, case, ORT_CPU, unknown=True) == []
    assert problems_of_rule(rule, case, ORT_CPU, every=True) == []
    assert problems_of_rule(rule, case, ORT_CPU, dtype=np.float64) == []


def test_the_slope_of_relu_at_its_kink() -> None:
    """The convention of the lowered form, which differs from the portable one below normal numbers and at NaN."""
    model, _ = one_call(DOMAIN, "ReluGrad", case(real(7), real(7)), unknown=False)
    lowered = lower(model, ORT_CPU)
    y = np.array([0.0, -0.0, 1e-39, 1.2e-38, 3e38, np.inf, np.nan], np.float32)
    (dx,) = run(to_proto(lowered), {"x0": np.full(7, 2.0, np.float32), "x1": y}).values()
    np.testing.assert_allclose(dx, [0, 0, 0.68, 2, 2, 2, np.nan], rtol=1e-4)


@pytest.mark.parametrize(
    ("graph", "x", "slopes"),
    [
        ("y0 = HardSwish(x0)", [-np.inf, -3.0, 3.0, np.inf, np.nan], [0.0, 0.0, 1.0, 1.0, 1.0]),
        ("y0 = Clip(x0, low, high)", [-np.inf, -1e-39, -0.0, 6.0, np.inf, np.nan], [0.0, 0.0, 1.0, 1.0, 0.0, np.nan]),
        ("y0 = Clip(x0, low)", [-np.inf, -1.2e-38, -1e-39, 0.0, np.inf, np.nan], [0.0, 0.0, 0.915, 1.0, 1.0, np.nan]),
    ],
)
def test_slopes_at_infinity_and_nan(graph: str, x: list[float], slopes: list[float]) -> None:
    """The conventions of lowered forms, which differ from the portable ones there and below normal numbers."""
    bounds = "low = Constant<value = real {0.0}>()  high = Constant<value = real {6.0}>()  "
    _, model = gradient_of(RULES["", "Identity"], case(real(len(x)), graph=bounds + graph))
    lowered = lower(model, ORT_CPU, lambda call, forms: forms)
    feeds = {"x0": np.array(x, np.float32), "y0.cotangent": np.ones(len(x), np.float32)}
    np.testing.assert_allclose(run(to_proto(lowered), feeds)["x0.grad"], slopes, rtol=1e-3)


def times(factor: float, serves: bool = True) -> Form:
    """A form of the bias gradient that is wrong by ``factor``."""
    dw = OPERATORS["ConvGradInput"]
    example = case(real(2, 4, 5, 5), real(4, 3, 3, 3), real(2, 3, 7, 7))
    write = lambda op, *inputs, **attrs: dw.portable(op, *inputs, **attrs) * factor if serves else None  # noqa: E731
    return Form("wrong", DOMAIN, dw.name, write, lambda call: True, (example,))


def test_wrong_forms_are_caught() -> None:
    assert problems_of_form(ORT_CPU, times(1.0)) == []
    assert len(problems_of_form(ORT_CPU, times(1.001))) == 2
    assert problems_of_form(ORT_CPU, times(1.0, serves=False)) == ["wrong serves none of its cases"]
    assert problems_of_form(ORT_CPU, replace(times(1.0), cases=())) == ["wrong serves none of its cases"]


def test_signs_and_where_they_are_not_quite() -> None:
    """As for the slope of Relu: below normal numbers, a ramp."""
    x = np.array([0.0, -0.0, 1e-39, -1.2e-38, 1.2e-38, -0.5, 3e38, -np.inf, np.inf, np.nan], np.float32)
    model, _ = one_call("", "Sign", case(real(len(x))), unknown=False)
    (sign,) = run(to_proto(lower(model, ORT_CPU)), {"x0": x}).values()
    np.testing.assert_allclose(sign, [0, 0, 0.34, -1, 1, -1, 1, -1, 1, np.nan], rtol=1e-4)

"""Every case of every rule: central differences in float64, second order, and onnxruntime in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph.rules  # noqa: F401  (fills the registry)
from gradgraph.registry import RULES, Case, Point, Rule
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle, in_float64

CASES = [pytest.param(r, c, id=f"{r.op_type}-{i}") for r in RULES.values() for i, c in enumerate(r.cases)]
POINTS = [pytest.param(r, p, id=f"{r.op_type}-{i}") for r in RULES.values() for i, p in enumerate(r.points)]


def assert_right(findings: list[Any]) -> None:
    wrong = [f for f in findings if not f.error < cases.TOLERANCE]
    assert not wrong, wrong


@pytest.mark.parametrize(("rule", "case"), CASES)
def test_vjp_matches_central_differences(rule: Rule, case: Case) -> None:
    assert_right(cases.check_first_order(cases.trial(rule, case)))


@pytest.mark.parametrize(("rule", "case"), CASES)
def test_vjp_with_unknown_shapes(rule: Rule, case: Case) -> None:
    if case.known_shapes:
        pytest.skip(case.known_shapes)
    assert_right(cases.check_first_order(cases.trial(rule, case, unknown=True)))


@pytest.mark.parametrize(("rule", "case"), CASES)
def test_vjp_with_literals_fed_at_run_time(rule: Rule, case: Case) -> None:
    reason = case.constant_literals or case.known_shapes
    if reason:
        pytest.skip(reason)
    assert_right(cases.check_first_order(cases.trial(rule, case, unknown=True, fed=True)))


@pytest.mark.parametrize(("rule", "case"), CASES)
def test_second_order_matches_central_differences(rule: Rule, case: Case) -> None:
    if case.first_order_only:
        pytest.skip(case.first_order_only)
    assert_right(cases.check_first_order(cases.second_order(cases.trial(rule, case))))


@pytest.mark.parametrize(("rule", "case"), CASES)
def test_onnxruntime_agrees_in_float32(rule: Rule, case: Case) -> None:
    if case.onnxruntime:
        pytest.skip(case.onnxruntime)
    trial = cases.trial(rule, case, unknown=not case.known_shapes, dtype=np.float32)
    expected = cases.run_gradient(trial, lambda m, feeds: list(Oracle(in_float64(m))(_wide(feeds)).values()))
    got = cases.run_gradient(trial, _in_onnxruntime)
    for e, g in zip(expected, got, strict=True):
        assert g.dtype == np.float32
        np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("rule", "point"), POINTS)
def test_conventions_at_kinks(rule: Rule, point: Point) -> None:
    assert cases.check_point(rule, point) == []


def test_every_rule_has_cases() -> None:
    assert [r.op_type for r in RULES.values() if not r.cases] == []


def _wide(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k: np.asarray(v, np.float64) if v.dtype == np.float32 else v for k, v in feeds.items()}


def _in_onnxruntime(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return list(ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feeds))

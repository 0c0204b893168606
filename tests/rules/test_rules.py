"""Every case of every rule in every way of the kit, and every point."""

from __future__ import annotations

import pytest

import gradgraph.rules.families  # noqa: F401  (fills the registry)
from gradgraph.rules.composites.table import rules_with_cases
from gradgraph.rules.registry import Case, Point, Rule
from gradgraph.verify import cases
from gradgraph.verify.kit import WAYS

POINTS = [pytest.param(r, p, id=f"{r.op_type}-{i}") for r in rules_with_cases() for i, p in enumerate(r.points)]

SHARES = {"onnxruntime": 0.4, "some sizes open": 0.25, "literals fed": 0.06, "second order": 0.2}


def share(way: str, case: Case, number: int) -> float:
    """Return the share of a case in one way for `make test`: each has its gradient measured, with shapes or without."""
    if way == "first order":
        return float(number % 2 == 0 or bool(case.known_shapes))
    return number % 2 if way == "shapes unknown" else SHARES[way]


CASES = [
    pytest.param(r, c, w, id=f"{r.op_type}-{i}-{w}", marks=pytest.mark.sweep(share(w, c, i)))
    for r in rules_with_cases()
    for i, c in enumerate(r.cases)
    for w in WAYS
]


@pytest.mark.parametrize(("rule", "case", "way"), CASES)
def test_the_gradient_is_right(rule: Rule, case: Case, way: str) -> None:
    if reason := WAYS[way].reason_to_skip(case):
        pytest.skip(reason)
    assert WAYS[way].disagreements(rule, case) == []


@pytest.mark.parametrize(("rule", "point"), POINTS)
def test_conventions_at_kinks(rule: Rule, point: Point) -> None:
    assert cases.check_point(rule, point) == []


def test_every_rule_has_cases() -> None:
    assert [r.op_type for r in rules_with_cases() if not r.cases] == []

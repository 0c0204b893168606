"""The table of operators has every differentiable operator."""

from __future__ import annotations

import pytest

from gradgraph.verify.operator_status import operators
from tests.conformance.node_cases import OPERATORS


@pytest.mark.sweep(0.486)
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_differentiable_operator_is_differentiated(operator: str) -> None:
    rows = {r["operator"]: r for r in operators()}
    assert rows[operator]["differentiable"]
    assert rows[operator]["inputs"]
    assert rows[operator]["order"]

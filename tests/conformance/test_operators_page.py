"""docs/reference/operators.md says what the tables say, and they tell of every differentiable operator."""

from __future__ import annotations

import pytest

from gradgraph.verify.operator_status import operators
from tests.conformance.node_cases import OPERATORS
from tests.pages.operators_page import PAGE, page


def test_the_page_is_made_from_the_tables() -> None:
    assert PAGE.read_text("utf-8") == page(), "run `python -m tests.pages.operators_page`"


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_differentiable_operator_is_differentiated(operator: str) -> None:
    rows = {r["operator"]: r for r in operators()}
    assert rows[operator]["differentiable"]
    assert rows[operator]["inputs"]
    assert rows[operator]["order"]

"""Every node test of ONNX whose derivative can be measured has the right gradients through all its inputs.

In float64 against central differences, with shapes known and unknown, and in onnxruntime in float32. What stands in
``exceptions.py`` is exempt from what is said there; operators that have no rule yet are skipped, and say so.
"""

from __future__ import annotations

import pytest

from gradgraph.errors import DifferentiationError, UnsupportedOperatorError
from tests.conformance.central_differences import NotCleanError, disagreements, measured, missing_rule, truth
from tests.conformance.exceptions import IN_NORMAL_FORM, NO_CASES, NOT_CLEAN, NOT_IN_ONNXRUNTIME, REFUSED, listed
from tests.conformance.node_cases import FURTHER, OPERATORS, NodeCase, node_cases

pytestmark = pytest.mark.filterwarnings("ignore")  # NumPy's, about overflows that some tests are about

WITH_CASES = [op for op in (*OPERATORS, *FURTHER) if op not in NO_CASES]


@pytest.mark.sweep(0)
@pytest.mark.parametrize("operator", WITH_CASES)
def test_gradients_are_right(operator: str) -> None:
    problems, missing = [], []
    for case in node_cases()[operator]:
        try:
            problems += [f"{case.name}: {sentence}" for sentence in _problems(case)]
        except UnsupportedOperatorError as error:
            if not missing_rule(error):
                raise
            missing.append(f"{case.name}: {error}")
    assert problems == []
    if missing:
        pytest.skip(f"no rule yet: {len(missing)} node tests, {missing[0]}")


def _problems(case: NodeCase) -> list[str]:
    expect_clean = not listed(NOT_CLEAN, case.name, case.operator)
    try:
        t = truth(case)
    except NotCleanError as reason:
        return [f"no derivative can be measured, and the case is not listed: {reason}"] if expect_clean else []
    if not expect_clean:
        return ["listed as not clean, but its derivative can be measured"]
    if listed(IN_NORMAL_FORM, case.name, case.operator):
        with pytest.raises(NotCleanError):
            measured(case, as_given=True)
    if not listed(REFUSED, case.name, case.operator):
        return disagreements(t)
    with pytest.raises(DifferentiationError):
        disagreements(t)
    return []


@pytest.mark.sweep(0)
def test_the_suite_is_whole() -> None:
    cases = node_cases()
    assert [op for op, found in cases.items() if not found] == list(NO_CASES)
    assert sum(map(len, cases.values())) > 900


@pytest.mark.sweep(0)
@pytest.mark.parametrize("table", [NOT_CLEAN, IN_NORMAL_FORM, REFUSED, NOT_IN_ONNXRUNTIME])
def test_exceptions_are_about_cases(table: dict[str, str]) -> None:
    names = {case.name for found in node_cases().values() for case in found}
    assert [key for key in table if key not in names and key not in OPERATORS and key not in FURTHER] == []

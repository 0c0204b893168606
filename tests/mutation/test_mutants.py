"""A sample of ``python -m tests.mutation``: damaged files are read, or refused in one sentence, within limits."""

from __future__ import annotations

import pytest

from tests.mutation.campaign import campaign

CHUNKS, EACH = 16, 128


@pytest.mark.sweep(0.01)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_mutants_are_read_or_refused(chunk: int) -> None:
    report = campaign(seed=0, numbers=range(chunk * EACH, (chunk + 1) * EACH))
    assert sum(report.outcomes.values()) == EACH
    assert sum(count for (_, outcome), count in report.outcomes.items() if outcome == "refused") > EACH // 4
    assert not report.findings, report.findings

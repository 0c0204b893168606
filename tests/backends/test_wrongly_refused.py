"""What the table of onnxruntime's CPU provider refuses, the onnxruntime that it was measured in refuses, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import onnxruntime as ort
import pytest
from running import run

import gradgraph as gg
import gradgraph.rules.families
from gradgraph.backends import BACKENDS
from gradgraph.rules.registry import RULES, Rule
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle


def taken(trial: cases.Trial) -> bool:
    """Does onnxruntime run it, and right?"""
    try:
        found = run(trial.model, trial.feeds)
        expected = Oracle(trial.model)(trial.feeds)
    except Exception:
        return False
    return all(np.allclose(found[y], expected[y], 1e-3, 1e-3, equal_nan=True) for y in trial.read)


def trials(rule: Rule) -> Iterator[cases.Trial]:
    for case in rule.cases:
        for dtype in (np.float32, np.float64):
            with contextlib.suppress(Exception):  # a case that has no such type
                yield cases.trial(rule, case, dtype=dtype)


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("rule", [r for (domain, _), r in RULES.items() if not domain], ids=lambda r: r.op_type)
def test_nothing_is_refused_that_runs_right(rule: Rule) -> None:
    table = BACKENDS["ort-cpu"].table
    assert table is not None
    if table.version != ort.__version__:
        pytest.skip(f"the table is of onnxruntime {table.version}")
    for trial in trials(rule):
        findings = [f for f in gg.check_backend(trial.model, "ort-cpu").findings if f.verdict in ("refused", "wrong")]
        assert not findings or not taken(trial), findings

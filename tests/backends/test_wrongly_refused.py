"""What the table of onnxruntime's CPU provider refuses, the installed onnxruntime refuses, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import onnxruntime as ort
import pytest

import gradgraph as gg
import gradgraph.rules.families
from gradgraph.backends import BACKENDS
from gradgraph.rules.registry import RULES, Rule
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle
from tests.kit.running import run

NOT_ASKED = {
    ("1.23.2", "OneHot"): "it ends the process at an index of no elements",
    ("1.23.2", "AveragePool"): "some windows over pads are wrong there, and no fact tells them from others",
    ("1.23.2", "RNN"): "the last states of sequences of no steps are wrong there, and no fact tells them from others",
}


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


@pytest.mark.sweep(0.04)
@pytest.mark.parametrize("rule", [r for (domain, _), r in RULES.items() if not domain], ids=lambda r: r.op_type)
def test_nothing_is_refused_that_runs_right(rule: Rule) -> None:
    table = BACKENDS["ort-cpu"].table
    assert table is not None
    if table.version != ort.__version__:
        pytest.skip(f"the rows were measured in onnxruntime {table.version}, and not in {ort.__version__}")
    if reason := NOT_ASKED.get((ort.__version__, rule.op_type)):
        pytest.skip(reason)
    for trial in trials(rule):
        findings = [f for f in gg.check_backend(trial.model, "ort-cpu").findings if f.verdict in ("refused", "wrong")]
        assert not findings or not taken(trial), findings

"""Every option trains and evaluates in other runtimes as in onnxruntime, or is refused by the name of the file."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.errors import BuildError
from gradgraph.step.step import Step
from tests.runtimes.runtimes import RUNTIMES, RefusedError, losses_in
from tests.runtimes.trained_options import CASES

SHARES = {"reference": 0.1, "openvino": 0.15, "tract": 0.15, "iree": 0, "tvm": 0}


@functools.cache
def expected(case: str) -> list[float]:
    """What onnxruntime has: the loss of each step, and of evaluation."""
    return trained("onnxruntime", case, CASES[case].step("auto"))


def trained(runtime: str, case: str, step: Step) -> list[float]:
    return losses_in(runtime, step, CASES[case].batches(), evaluate=not CASES[case].draws)


def hold(runtime: str, case: str, step: Step) -> None:
    """It trains right there; or it is refused, where the table of the runtime does not call every node right."""
    findings = gg.check_backend(step, RUNTIMES[runtime].backend).findings
    unsure = [f for f in findings if not (CASES[case].draws and f.file == "eval.onnx")]
    try:
        found = trained(runtime, case, step)
    except RefusedError as error:
        assert unsure, error
        return
    if not any(f.verdict in ("wrong", "refused") for f in unsure):
        np.testing.assert_allclose(found, expected(case), rtol=0, atol=CASES[case].atol)


EACH = [
    pytest.param(runtime, case, marks=pytest.mark.sweep(share)) for runtime, share in SHARES.items() for case in CASES
]


@pytest.mark.sweep(0.064)
@pytest.mark.parametrize(("runtime", "case"), EACH)
def test_steps_for_the_runtime(runtime: str, case: str) -> None:
    if missing := RUNTIMES[runtime].missing():
        pytest.skip(missing)
    try:
        step = CASES[case].step(RUNTIMES[runtime].backend)
    except BuildError as error:
        assert error.findings and all(".onnx: node '" in f.subject for f in error.findings)
        return
    hold(runtime, case, step)


@pytest.mark.sweep(0.04)
@pytest.mark.parametrize(("runtime", "case"), EACH)
def test_what_the_table_calls_right_is_right(runtime: str, case: str) -> None:
    """Of a step that is written for no runtime."""
    if missing := RUNTIMES[runtime].missing():
        pytest.skip(missing)
    hold(runtime, case, CASES[case].step("portable"))


def test_the_loss_of_evaluation_is_that_of_averages() -> None:
    """So that the cases with averages would find out a runtime that evaluates other weights."""
    without = trained("onnxruntime", "frozen", CASES["frozen"].step("auto"))
    assert len(without) == len(expected("ema")) == len(CASES["ema"].batches()) + 1
    step = CASES["ema"].step("auto")
    assert step.manifest.averages
    plain = gg.Trainer(step, device="cpu")
    for batch in CASES["ema"].batches():
        plain.step(batch)
    first = CASES["ema"].batches()[0]
    own, averaged = (float(plain.evaluate(first, averaged=averaged)["loss"]) for averaged in (False, True))
    assert abs(own - averaged) > 1e-3
    np.testing.assert_allclose(expected("ema")[-1], averaged, atol=1e-5)

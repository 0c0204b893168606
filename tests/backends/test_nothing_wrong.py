"""No step that is built for a backend has a node that the table of its runtime calls refused or wrong."""

from __future__ import annotations

import numpy as np
import pytest

import gradgraph as gg
import gradgraph.rules.families
from gradgraph.backends import BACKENDS
from gradgraph.errors import BuildError
from gradgraph.rules.registry import RULES, Rule
from gradgraph.step.step import Step
from gradgraph.verify import cases
from tests.kit.running import run
from tests.runtimes.four_networks import NETWORKS
from tests.runtimes.trained_options import CASES

TESTED = [name for name, b in BACKENDS.items() if b.table is not None and b.table.tested and not b.for_all]
STRICT = [name for name in TESTED if BACKENDS[name].for_steps]


def said_by(error: BuildError, backend: str) -> bool:
    """Does each finding name a node, the runtime and a reason?"""
    table = BACKENDS[backend].table
    assert table is not None
    return bool(error.findings) and all(
        "node " in f.subject and f"cannot run in {table.title}: " in f.what for f in error.findings
    )


@pytest.mark.sweep(0.03)
@pytest.mark.parametrize("sizes", ["fixed", "open"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("backend", STRICT)
def test_networks(backend: str, network: str, sizes: str) -> None:
    try:
        step = NETWORKS[network].step(backend, sizes == "fixed")
    except BuildError as error:
        assert said_by(error, backend)
        assert (network, sizes) != ("MLP", "fixed"), error  # which every runtime trains
        return
    report = gg.check_backend(step, backend)
    bad = [f for f in report.findings if f.verdict in ("refused", "wrong")]
    functions = [f for f in bad if f.node == "the model"]
    assert bad == functions
    assert not functions or BACKENDS[backend].keeps_functions


@pytest.mark.sweep(0.03)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", STRICT)
def test_options(backend: str, case: str) -> None:
    """Refusals name the file; for the sake of eval.onnx alone nothing is refused that only cannot be evaluated."""
    try:
        step = CASES[case].step(backend)
    except BuildError as error:
        assert said_by(error, backend)
        assert all(".onnx: node '" in f.subject for f in error.findings)
        return
    bad = [f for f in gg.check_backend(step, backend).findings if f.verdict in ("refused", "wrong")]
    left = [f for f in bad if f.node != "the model" and (f.file, f.verdict) != ("eval.onnx", "refused")]
    assert not left


@pytest.mark.sweep(0.37)
@pytest.mark.parametrize("backend", ["openvino", "portable"])
@pytest.mark.parametrize("case", ["ema", "schedule_free", "lookahead"])
def test_no_two_outputs_are_one_constant(case: str, backend: str) -> None:
    """OpenVINO, for one, loses one of them."""
    step, plain = CASES[case].step(backend), CASES[case].step("auto")
    assert alike(plain)
    assert not alike(step)
    given, expected = run(step.init), run(plain.init)
    assert given.keys() == expected.keys()
    assert all(np.array_equal(given[name], value) for name, value in expected.items())


def alike(step: Step) -> list[str]:
    findings = gg.check_backend(step, "openvino").findings
    return [f.reason for f in findings if f.file == "init.onnx" and "another output" in f.reason]


@pytest.mark.sweep(0)
def test_a_model_that_draws_when_it_is_evaluated_trains(caplog: pytest.LogCaptureFixture) -> None:
    """In a runtime that draws nothing: training there needs no eval.onnx."""
    step = CASES["drawn"].step("tract")
    assert "eval.onnx: node 'RandomNormalLike' (RandomNormalLike) cannot run in tract" in caplog.text
    assert {f.file for f in gg.check_backend(step, "tract").findings if f.verdict == "refused"} == {"eval.onnx"}


@pytest.mark.sweep(0.022)
@pytest.mark.parametrize("rule", [r for (domain, _), r in RULES.items() if not domain], ids=lambda r: r.op_type)
@pytest.mark.parametrize("backend", TESTED)
def test_gradients_of_rules(backend: str, rule: Rule) -> None:
    """Fixed sizes; a rule whose gradient the runtime would refuse, or compute wrong, is refused by name."""
    trial = cases.trial(rule, rule.cases[0], dtype=np.float32)
    try:
        model = gg.vjp(trial.model, outputs=trial.read, wrt=trial.wrt, allow_unused=True, backend=backend)
    except BuildError as error:
        assert said_by(error, backend)
        return
    assert gg.check_backend(model, backend).ok


@pytest.mark.sweep(0)
def test_there_is_something_to_refuse() -> None:
    """The forward pass alone, in standard nodes, has nodes that some runtimes refuse or compute wrong."""
    step: Step = NETWORKS["CNN"].step("portable", True)
    assert "openvino" in STRICT
    report = gg.check_backend(step, "openvino")
    assert not report.ok
    assert {f.operator for f in report.findings if f.verdict == "refused"} == {"MaxUnpool"}

"""No step that is built for a backend has a node that the table of its runtime calls refused or wrong."""

from __future__ import annotations

import numpy as np
import pytest
from runtimes.four_networks import NETWORKS

import gradgraph as gg
import gradgraph.rules.families
from gradgraph.backends import BACKENDS
from gradgraph.errors import BuildError
from gradgraph.rules.registry import RULES, Rule
from gradgraph.step.step import Step
from gradgraph.verify import cases

TESTED = [name for name, b in BACKENDS.items() if b.table is not None and b.table.tested and not b.for_all]
STRICT = [name for name in TESTED if BACKENDS[name].for_steps]


def said_by(error: BuildError, backend: str) -> bool:
    """Does each finding name a node, the runtime and a reason?"""
    table = BACKENDS[backend].table
    assert table is not None
    return bool(error.findings) and all(
        "node " in f.subject and f"cannot run in {table.title}: " in f.what for f in error.findings
    )


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


@pytest.mark.sweep(0.3)
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


def test_there_is_something_to_refuse() -> None:
    """The forward pass alone, in standard nodes, has nodes that some runtimes refuse or compute wrong."""
    step: Step = NETWORKS["CNN"].step("portable", True)
    assert "openvino" in STRICT
    report = gg.check_backend(step, "openvino")
    assert not report.ok
    assert {f.operator for f in report.findings if f.verdict == "refused"} == {"MaxUnpool"}

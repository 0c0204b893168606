"""What a step is written for, and what it says where it cannot run."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.backends import BACKENDS, step_backends
from gradgraph.backends.machine_requirements import check_runs_here
from gradgraph.errors import BuildError, RuntimeUnavailableError
from tests.kit.convolutions import convolutions, feeds
from tests.kit.running import run


def built(backend: str) -> gg.Step:
    """With an open batch, where the runtime takes that."""
    try:
        return gg.build(convolutions("batch"), "mse", gg.optim.sgd(0.1), backend=backend)
    except BuildError as error:  # also for what finds out a size when it runs
        if not error.findings:
            raise
        return gg.build(convolutions(3), "mse", gg.optim.sgd(0.1), backend=backend)


@pytest.mark.sweep(0.52)
@pytest.mark.parametrize("backend", step_backends())
def test_every_backend_gives_the_same_numbers(backend: str) -> None:
    step, auto = built(backend), built("auto")
    assert step.manifest.backend == backend
    assert bool(step.train.functions) == (backend in ("auto", "web"))
    if backend in ("portable", "openvino", "ort-cuda"):
        onnx.checker.check_model(step.train, full_check=True)
    given = feeds(auto.train)
    for a, b in zip(run(auto.train, given).values(), run(step.train, given).values(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("backend", "machine", "here", "says"),
    [
        ("ort-cpu", BACKENDS["ort-cpu"].machine(), "ort-cuda", "runs on the CPU provider only"),
        ("ort-cuda", "", "ort-cpu", "runs on the CUDA provider only"),
        ("ort-cpu", "nchwc5", "ort-cpu", "a processor with nchwc5, but this one has"),
    ],
)
def test_a_step_for_another_machine_is_refused(backend: str, machine: str, here: str, says: str) -> None:
    with pytest.raises(RuntimeUnavailableError, match=says):
        check_runs_here(BACKENDS[backend], machine, BACKENDS[here])
    for fine in ("auto", "portable", "web", "openvino"):
        check_runs_here(BACKENDS[fine], "", BACKENDS[here])


def test_the_trainer_refuses_it_too() -> None:
    step = built("ort-cpu")
    gg.Trainer(step, device="cpu")
    foreign = gg.Step(step.train, step.init, step.eval, dataclasses.replace(step.manifest, machine="nchwc5"))
    with pytest.raises(RuntimeUnavailableError, match="build the step again here"):
        gg.Trainer(foreign, device="cpu")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(BuildError, match="there is no backend 'ort-cpuu'; did you mean"):
        built("ort-cpuu")

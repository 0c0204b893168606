"""Exported C on an emulated Cortex-M4 trains as onnxruntime does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gradgraph as gg
from tests.kit.cortex_m4 import NEEDS_BOARD, built, code_sizes, losses, main_of, output_of, section_sizes
from tests.kit.networks_in_c import NETWORKS, OPTIMIZERS, step_of
from tests.kit.running import Loop
from tests.kit.trained_c import batch_of

pytestmark = NEEDS_BOARD


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_cortex_m4_trains_as_onnxruntime_does(name: str, optimizer: str, tmp_path: Path) -> None:
    step = step_of(name, optimizer)
    made = gg.export.c(step, tmp_path / "c")
    loop, rng, batches, expected = Loop(step), np.random.default_rng(0), [], []
    results: dict[str, np.ndarray] = {}
    for _ in range(10):
        batches.append(batch_of(step, rng))
        results = loop(batches[-1])
        expected.append(results[step.manifest.loss_output])
    rates = list(step.manifest.hyperparameters.values())
    program = built(tmp_path / "c", main_of(batches, rates, list(results), step.manifest.loss_output))
    np.testing.assert_allclose(losses(output_of(program)), np.ravel(expected), atol=1e-5)
    sizes = section_sizes(program)
    assert sizes.get(".data", 0) + sizes[".bss"] <= made.ram + 64  # nothing else is in RAM


def test_functions_that_nothing_calls_are_not_in_the_program(tmp_path: Path) -> None:
    step = step_of("mlp")
    gg.export.c(step, tmp_path / "c")
    batch = batch_of(step, np.random.default_rng(0))
    results = [step.manifest.loss_output, *step.manifest.metrics]
    program = built(tmp_path / "c", main_of([batch], [0.1], results, results[0]), "-Os")
    assert "trainer_step" in code_sizes(program)
    assert not {"trainer_save", "trainer_evaluate"} & code_sizes(program).keys()

"""Train a step in C beside onnxruntime."""

from __future__ import annotations

import numpy as np

from gradgraph.step.step import Step
from tests.kit.compiled_c import Program
from tests.kit.running import Loop

CLASSES = 4


def batch_of(step: Step, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return random inputs and targets; class labels include ignored ones."""
    found = {}
    for spec in (*step.manifest.inputs, *step.manifest.targets):
        shape = tuple(int(n) for n in spec.shape)
        if spec.dtype == "int64":
            found[spec.name] = rng.integers(0, CLASSES, shape)
        else:
            found[spec.name] = rng.normal(size=shape).astype(np.float32)
    return found


def train_beside(step: Step, program: Program, count: int, states: bool = False) -> float:
    """Run ``count`` steps of C and of onnxruntime; return the largest difference of their losses.

    With ``states``, compare the final states, too: Adam and Lion amplify the rounding of gradients that are zero, such
    as those of a key's bias.
    """
    loop, rng, worst = Loop(step), np.random.default_rng(0), 0.0
    rates = list(step.manifest.hyperparameters.values())
    for _ in range(count):
        batch = batch_of(step, rng)
        expected = loop(batch)
        results = {n: np.zeros_like(v) for n, v in expected.items()}
        assert program.call("step", *batch.values(), *rates, *results.values()) == 0
        worst = max(worst, *(float(np.abs(results[n] - v).max()) for n, v in expected.items()))
    if states:
        for name, value in program.values().items():
            np.testing.assert_allclose(value, loop.state[name], rtol=1e-3, atol=1e-4, err_msg=name)
    return worst

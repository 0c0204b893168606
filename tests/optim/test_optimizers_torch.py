"""Optimizers against torch.optim: same data, weights and hyperparameters, losses of 50 steps."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kit.optim_cases import OPTIMIZERS, STEPS, WEIGHTS, batches, losses

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", [name for name, case in OPTIMIZERS.items() if case.torch_class])
def test_losses_are_those_of_torch(name: str) -> None:
    case = OPTIMIZERS[name]
    # a MatMul has (inputs, outputs), where nn.Linear has (outputs, inputs)
    weights = {n: torch.tensor(np.ascontiguousarray(w.T), requires_grad=True) for n, w in WEIGHTS.items()}
    trained = [w for w in weights.values() if w.dim() == 2 or not case.only_matrices]
    theirs = getattr(torch.optim, case.torch_class)(trained, **case.arguments, **case.torch_arguments)
    expected = []
    for batch in batches(case.full_batch):

        def loss(batch: dict[str, np.ndarray] = batch) -> torch.Tensor:
            theirs.zero_grad()
            h = torch.tanh(torch.tensor(batch["x"]) @ weights["w1"].T + weights["b1"])
            found = torch.nn.functional.mse_loss(h @ weights["w2"].T + weights["b2"], torch.tensor(batch["target"]))
            found.backward()
            return found

        expected.append(theirs.step(loss).item())
    assert len(expected) == STEPS and len(set(expected)) == STEPS
    found = losses(case.optimizer(), case.only_matrices, case.full_batch)
    np.testing.assert_allclose(found, expected, rtol=case.rtol)

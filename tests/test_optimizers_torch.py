"""Optimizers against torch.optim: same data, weights and hyperparameters, losses of 50 steps."""

from __future__ import annotations

import numpy as np
import pytest
from optim_cases import OPTIMIZERS, STEPS, WEIGHTS, batches, losses

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", [name for name, case in OPTIMIZERS.items() if case.torch_class])
def test_losses_are_those_of_torch(name: str) -> None:
    case = OPTIMIZERS[name]
    full = case.recipe == "rprop"
    weights = {n: torch.tensor(w, requires_grad=True) for n, w in WEIGHTS.items()}
    trained = [w for w in weights.values() if w.dim() == 2 or not case.only_matrices]
    theirs = getattr(torch.optim, case.torch_class)(trained, **case.arguments)
    expected = []
    for batch in batches(full):
        theirs.zero_grad()
        h = torch.tanh(torch.tensor(batch["x"]) @ weights["w1"] + weights["b1"])
        loss = torch.nn.functional.mse_loss(h @ weights["w2"] + weights["b2"], torch.tensor(batch["target"]))
        loss.backward()
        theirs.step()
        expected.append(loss.item())
    assert len(expected) == STEPS and len(set(expected)) == STEPS
    np.testing.assert_allclose(losses(case.optimizer(), case.only_matrices, full), expected, rtol=case.rtol)

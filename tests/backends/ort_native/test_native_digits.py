"""Training with native kernels and few values to a norm: gradients keep as many digits as PyTorch's in float32."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="compares with PyTorch")
from tests.networks.gradient_digits import MOST, times_torch_s

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("library")]


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("network", ["repvit", "mobilenet"])
def test_errors_are_at_most_twice_those_of_torch(network: str) -> None:
    (found,) = times_torch_s(network, [("auto", True)])
    assert {n: ratio for n, ratio in found.items() if ratio > MOST} == {}

"""Training with few values to a norm: gradients keep as many digits as PyTorch's in float32."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="compares with PyTorch")
from tests.networks.gradient_digits import MOST, times_torch_s
from tests.networks.small_vision import NETWORKS

pytestmark = pytest.mark.torch


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("network", NETWORKS)
def test_errors_are_at_most_twice_those_of_torch(network: str) -> None:
    for found in times_torch_s(network, [("portable", False), ("auto", False)]):
        assert {n: ratio for n, ratio in found.items() if ratio > MOST} == {}

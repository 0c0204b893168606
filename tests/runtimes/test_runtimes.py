"""Four networks train in other runtimes as in onnxruntime, for twenty steps."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from runtimes.four_networks import NETWORKS, STEPS
from runtimes.runtimes import RUNTIMES, losses_in

ATOL = 1e-4
RIGHT = [
    ("reference", "MLP", "open"),
    ("reference", "CNN", "open"),
    ("reference", "transformer", "open"),
    *(("node", network, "open") for network in NETWORKS),
    *(pytest.param("wasm", network, "open", marks=pytest.mark.sweep(network == "CNN")) for network in NETWORKS),
    pytest.param("webgpu", "MLP", "open", marks=pytest.mark.sweep(0)),
    pytest.param("jsep", "MLP", "open", marks=pytest.mark.sweep(0)),
    ("openvino", "MLP", "open"),
    ("openvino", "MLP", "fixed"),
    ("openvino", "CNN", "fixed"),
    ("openvino", "transformer", "open"),
]


@functools.cache
def expected(network: str, sizes: str) -> list[float]:
    """What onnxruntime has."""
    fixed = sizes == "fixed"
    return losses_in("onnxruntime", NETWORKS[network].step("auto", fixed), NETWORKS[network].batches(fixed))


@pytest.mark.parametrize(("runtime", "network", "sizes"), RIGHT)
def test_losses_are_those_of_onnxruntime(runtime: str, network: str, sizes: str) -> None:
    if missing := RUNTIMES[runtime].missing():
        pytest.skip(missing)
    fixed = sizes == "fixed"
    step = NETWORKS[network].step(RUNTIMES[runtime].backend, fixed)
    found = losses_in(runtime, step, NETWORKS[network].batches(fixed))
    np.testing.assert_allclose(found, expected(network, sizes), rtol=0, atol=ATOL)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_networks_learn(network: str) -> None:
    """So that a wrong gradient, mask or update would be seen."""
    found = expected(network, "open")
    assert len(found) == STEPS
    assert np.mean(found[-3:]) < 0.85 * np.mean(found[:3])

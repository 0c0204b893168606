"""Four networks train in other runtimes as in onnxruntime, for twenty steps."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from gradgraph.errors import BuildError
from tests.runtimes.four_networks import NETWORKS, STEPS
from tests.runtimes.runtimes import REFUSED, RUNTIMES, cases_of, losses_in

ATOL = 1e-4
# of runtimes that install in reasonable time, the share of their cases that every run of the tests tries
SHARES = {"reference": 0.3, "node": 1, "wasm": 0.25, "webgpu": 0, "openvino": 0.3, "tract": 0.3}
RIGHT = [
    pytest.param(runtime, network, sizes, marks=pytest.mark.sweep(share))
    for runtime, share in SHARES.items()
    for network, sizes in cases_of(runtime)
    if (runtime, network, sizes) not in REFUSED
]


@functools.cache
def expected(network: str, sizes: str) -> list[float]:
    """What onnxruntime has."""
    fixed = sizes == "fixed"
    return losses_in("onnxruntime", NETWORKS[network].step("auto", fixed), NETWORKS[network].batches(fixed))


@pytest.mark.sweep(0)
@pytest.mark.parametrize(("runtime", "network", "sizes"), RIGHT)
def test_losses_are_those_of_onnxruntime(runtime: str, network: str, sizes: str) -> None:
    if missing := RUNTIMES[runtime].missing():
        pytest.skip(missing)
    fixed = sizes == "fixed"
    step = NETWORKS[network].step(RUNTIMES[runtime].backend, fixed)
    found = losses_in(runtime, step, NETWORKS[network].batches(fixed))
    np.testing.assert_allclose(found, expected(network, sizes), rtol=0, atol=ATOL)


@pytest.mark.parametrize(("runtime", "network", "sizes"), REFUSED)
def test_what_cannot_be_right_is_refused_by_name(runtime: str, network: str, sizes: str) -> None:
    backend = RUNTIMES[runtime].backend
    with pytest.raises(BuildError, match="cannot run in"):
        NETWORKS[network].step(backend, sizes == "fixed")


@pytest.mark.sweep(0.06)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_networks_learn(network: str) -> None:
    """So that a wrong gradient, mask or update would be seen."""
    found = expected(network, "open")
    assert len(found) == STEPS
    assert np.mean(found[-3:]) < 0.85 * np.mean(found[:3])

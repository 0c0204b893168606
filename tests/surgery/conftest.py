"""Each test draws the same numbers, whichever others have run."""

from __future__ import annotations

import numpy as np
import pytest

from tests.surgery import test_adapters


@pytest.fixture(autouse=True)
def _the_same_numbers(request: pytest.FixtureRequest) -> None:
    for module in (request.module, test_adapters):  # whose helpers others use
        if hasattr(module, "RNG"):
            module.RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state

"""Random options on two and three ranks: each run equals one process, or is refused by name before a step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.kit.npz import npz
from tests.parallel.mpi_jobs import ROOT, job, needs_mpi
from tests.parallel.ranks_walk import drawn

pytestmark = needs_mpi
TOGETHER = 10  # runs of one job


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize("first", range(0, 100, TOGETHER))
def test_random_options(first: int, tmp_path: Path) -> None:
    program = str(ROOT / "tests" / "parallel" / "ranks_walk.py")
    ran = job(2 + first // TOGETHER % 2, program, str(tmp_path), str(first), str(TOGETHER))
    assert ran.returncode == 0, ran.stderr[-3000:]
    refused = 0
    for number in range(first, first + TOGETHER):
        results = npz(tmp_path / f"{number}.npz")
        rows = json.loads(str(results["history"]))
        if "refused" in rows:
            refused += 1
            assert ";" in rows["refused"][0]  # what to do about it
            continue
        case, ways = drawn(number)
        state, history = case.trained(None)
        said = f"{number}: {dict(case.options)} {dict(case.fit)} {ways}"
        for name, expected in state.items():
            size = max(float(np.abs(expected).max(initial=0)), 1e-3)
            np.testing.assert_allclose(
                results[f"state {name}"], expected, rtol=0, atol=case.tolerance * size, err_msg=f"{name} of {said}"
            )
        assert list(rows) == list(history), said
        for column, numbers in history.items():
            np.testing.assert_allclose(rows[column], numbers, rtol=max(case.tolerance, 2e-6), atol=1e-6, err_msg=said)
    assert refused < TOGETHER

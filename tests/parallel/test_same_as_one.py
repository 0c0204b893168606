"""One, two and four ranks come to the weights of one process, whatever is trained and measured."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from tests.kit.npz import npz
from tests.parallel import ranks_cases
from tests.parallel.mpi_jobs import ROOT, job, needs_mpi
from tests.parallel.ranks_cases import CASES, of_kind

pytestmark = needs_mpi


@functools.cache
def alone(name: str) -> tuple[dict[str, np.ndarray], dict[str, list[float]]]:
    return CASES[name].trained(None)


RUNS = [(2, "plain"), (4, "plain"), (2, "sharded"), (4, "sharded"), (2, "joint"), (4, "joint, sharded"), (2, "far")]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all cases of a kind with so many ranks."""
    ranks, kind = request.param
    folder = tmp_path_factory.getbasetemp() / f"{kind}{ranks}"
    if not folder.exists():
        folder.mkdir()
        ran = job(ranks, str(ROOT / "tests" / "parallel" / "ranks_cases.py"), str(folder), kind)
        assert ran.returncode == 0, ran.stderr
    return folder


def each(equal: bool) -> pytest.MarkDecorator:
    """Every case that is, or is not, to equal one process, with all ranks that train it."""
    pairs = [(run, name) for run in RUNS for name in of_kind(run[1], run[0]) if CASES[name].equal == equal]
    ids = [f"{ranks} {kind}-{name}" for (ranks, kind), name in pairs]
    return pytest.mark.parametrize(("found", "name"), pairs, indirect=["found"], ids=ids)


@each(equal=True)
def test_ranks_come_to_the_weights_and_the_history_of_one(name: str, found: Path) -> None:
    (state, history), case = alone(name), CASES[name]
    results = npz(found / f"{name}.npz")
    for tensor, expected in state.items():
        size = max(float(np.abs(expected).max(initial=0)), 1e-3)
        np.testing.assert_allclose(
            results[f"state {tensor}"], expected, rtol=0, atol=case.tolerance * size, err_msg=tensor
        )
    rows: dict[str, Any] = json.loads(str(results["history"]))
    history = {column: numbers for column, numbers in history.items() if column != "clean_loss"}  # of one process only
    assert list(rows) == list(history)
    for column, numbers in history.items():
        np.testing.assert_allclose(rows[column], numbers, rtol=max(case.tolerance, 2e-6), atol=1e-6, err_msg=column)


@each(equal=False)
def test_what_goes_its_own_way_on_each_rank_is_the_same_state_on_all(name: str, found: Path) -> None:
    """Each step has compared it (check_every=1); the counters are those of one process."""
    state, _ = alone(name)
    results = npz(found / f"{name}.npz")
    assert all(np.isfinite(results[f"state {tensor}"]).all() for tensor in state)
    for counter in {"rng", "step"} & state.keys():
        if "precision" not in CASES[name].options:  # of which float16 skips the steps in which a rank overflows
            np.testing.assert_array_equal(results[f"state {counter}"], state[counter])


def test_a_job_of_one_rank_is_one_process() -> None:
    parallel = gg.DataParallel()
    assert (parallel.rank, parallel.ranks, parallel.is_first) == (0, 1, True)
    state, history = CASES["ignored labels"].trained(parallel)
    expected = alone("ignored labels")
    assert history == expected[1] and all(np.array_equal(state[n], value) for n, value in expected[0].items())


def test_the_tolerance_would_find_a_wrong_weight() -> None:
    """Shares weighed alike whatever counts in them are further apart than what is allowed."""
    case = CASES["ignored labels"]
    plain, ignoring = ranks_cases.Case(case.options).trained(None)[0], alone("ignored labels")[0]
    assert max(float(np.abs(plain[n] - value).max()) for n, value in ignoring.items()) > 1e3 * case.tolerance

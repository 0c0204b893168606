"""A checkpoint of four ranks goes on with two, and one of two with four: nothing of it is lost."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.kit.npz import npz
from tests.parallel import other_ranks
from tests.parallel.mpi_jobs import ROOT, job, needs_mpi

pytestmark = needs_mpi
PROGRAM = str(ROOT / "tests" / "parallel" / "other_ranks.py")


@functools.cache
def alone(kind: str) -> dict[str, np.ndarray]:
    own = other_ranks.trainer(None, kind)
    other_ranks.train(own)
    return own.state_dict()


@pytest.fixture(scope="module", params=[(4, 2), (2, 4)], ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of some ranks left, and then one of others."""
    found = tmp_path_factory.mktemp("ranks")
    for ranks, part in zip(request.param, ("begin", "end"), strict=True):
        ran = job(ranks, PROGRAM, part, str(found))
        assert ran.returncode == 0, ran.stderr
    return found


@pytest.mark.sweep(0)
def test_shared_state_goes_on_as_one_process_would(folder: Path) -> None:
    found, expected = npz(folder / "shard_state.state.npz"), alone("shard_state")
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("kind", ["top_k", "power_sgd"])
def test_the_errors_of_all_ranks_are_there_again(kind: str, folder: Path) -> None:
    before, after = npz(folder / f"{kind}.before.npz"), npz(folder / f"{kind}.after.npz")
    assert set(before) == set(after) and before
    for name in before:
        assert float(np.abs(before[name]).max()) > 1e-6
        np.testing.assert_allclose(after[name], before[name], rtol=1e-12, atol=1e-15, err_msg=name)


def test_rounds_go_on_from_the_mean_of_all_ranks(folder: Path) -> None:
    """In the middle of a round, the state of a checkpoint is the mean: other ranks, or one process, begin with it."""
    whole = load_file(folder / "diloco.ckpt")
    ranks = {name.split("/")[1] for name in whole if name.startswith("beside/")}
    assert len(ranks) in (2, 4)
    start = other_ranks.trainer(None, "diloco")
    start.load(folder / "diloco.ckpt")
    for name in ("first.weight", "last.weight", "first.weight.exp_avg_sq", "first.weight.ema"):
        parts = np.array([whole[f"beside/{rank}/state/{name}"] for rank in sorted(ranks)])
        assert float(np.ptp(parts, axis=0).max()) > 1e-6, name
        np.testing.assert_allclose(whole[name], parts.mean(axis=0), rtol=1e-12, atol=1e-15, err_msg=name)
        np.testing.assert_array_equal(start.state_dict()[name], whole[name])


@pytest.mark.parametrize("kind", [kind for kind in other_ranks.KINDS if kind != "shard_state"])
def test_a_compressed_run_learns_on(kind: str, folder: Path) -> None:
    """All steps are taken, and weights have moved about as far as those of one process."""
    found, expected = npz(folder / f"{kind}.state.npz"), alone(kind)
    start = other_ranks.trainer(None, kind).state_dict()
    weights = [name for name, value in start.items() if value.dtype == np.float64 and np.ndim(value) == 2]
    assert weights and set(found) == set(expected)
    for name in weights:
        own, whole = found[name] - start[name], expected[name] - start[name]
        assert float(np.sum(own * whole)) > 0.3 * float(np.sum(whole * whole)), name

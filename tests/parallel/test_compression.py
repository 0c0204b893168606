"""Compressed gradients: what their papers say, to the bit or within rounding; the accuracy that they reach; resumed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.parallel.data_parallel import COMPRESSIONS
from tests.kit.npz import npz
from tests.parallel import compressed
from tests.parallel.mpi_jobs import ROOT, job, needs_mpi

pytestmark = needs_mpi
PROGRAM = str(ROOT / "tests" / "parallel" / "compressed.py")


@pytest.fixture(scope="module", params=[2, 4])
def sums(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp(f"sums{request.param}")
    ran = job(request.param, PROGRAM, str(folder))
    assert ran.returncode == 0, ran.stderr
    return request.param, folder / "sums.npz"


@pytest.mark.parametrize("name", [*compressed.TRIED, compressed.OWN])
def test_a_compression_is_that_of_its_paper(name: str, sums: tuple[int, Path]) -> None:
    ranks, path = sums
    found = npz(path)
    for step, expected in enumerate(compressed.references(ranks)[name]):
        exact = "power" not in name  # whose sums MPI adds up in an order of its own
        np.testing.assert_allclose(found[f"{name} {step}"], expected, rtol=0, atol=0 if exact else 1e-4)


@pytest.mark.parametrize("name", compressed.ROUNDS)
def test_rounds_of_local_steps_are_those_of_the_paper(name: str, sums: tuple[int, Path]) -> None:
    ranks, path = sums
    found = npz(path.with_name("rounds.npz"))
    start = found[f"{name} start"]
    assert float(np.abs(found[name] - start).max()) > 0.05
    np.testing.assert_allclose(found[name], compressed.outer_steps(name, start, ranks), rtol=1e-5, atol=1e-6)


def test_each_compression_has_a_reference() -> None:
    assert {name.partition("(")[0] for name in (*compressed.TRIED, *compressed.ROUNDS)} == set(COMPRESSIONS)


@pytest.mark.sweep(0)
def test_the_digits_are_learnt_as_well_with_errors_fed_back_and_not_without() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn has the digits")
    names = [
        "none",
        "float16",
        "bfloat16",
        "top_k(ratio=0.01)",
        "top_k(ratio=0.01, feedback=False)",
        "power_sgd(rank=2)",
        "local_sgd(every=8)",
        "diloco(every=8)",
    ]
    ran = job(2, "-m", "benchmarks.compression", "--job", *names)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    dense, without = found["none"], found["top_k(ratio=0.01, feedback=False)"]
    for name in names[1:4] + names[5:]:
        assert found[name]["accuracy"] >= dense["accuracy"] - 0.02, (name, found)
    assert without["accuracy"] < found["top_k(ratio=0.01)"]["accuracy"] - 0.01, found
    assert (
        found["float16"]["bytes"] < 0.52 * dense["bytes"]
        and found["top_k(ratio=0.01)"]["bytes"] < 0.05 * dense["bytes"]
    )


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(gg.GradgraphError, match="no compression 'top_l'"):
        gg.DataParallel(compress="top_l")
    with pytest.raises(gg.GradgraphError, match="ratio"):
        gg.DataParallel(compress="top_k(ratio=2.0)")
    with pytest.raises(gg.GradgraphError, match="remove compress or shard_state"):
        gg.DataParallel(compress="float16", shard_state=True)

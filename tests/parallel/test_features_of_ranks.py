"""Ranks that keep features of frozen layers have the losses and weights of ranks that do not."""

from __future__ import annotations

from pathlib import Path

from tests.parallel.mpi_jobs import ROOT, job, needs_mpi

pytestmark = needs_mpi


def test_kept_features_of_two_ranks(tmp_path: Path) -> None:
    ran = job(2, str(ROOT / "tests" / "parallel" / "ranks_features.py"), str(tmp_path))
    assert ran.returncode == 0 and ran.stdout == "same", ran.stderr

"""Starting programs with mpiexec in tests, where mpi4py and an MPI are installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 240  # of a job


def _mpiexec() -> str | None:
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


MPIEXEC = _mpiexec()
needs_mpi = pytest.mark.skipif(MPIEXEC is None, reason="mpi4py and an MPI are not installed: pip install -e .[mpi]")


def job(ranks: int, *words: str, cwd: Path = ROOT, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """What becomes of ``mpiexec -n RANKS python WORDS``, one thread each."""
    assert MPIEXEC is not None
    return subprocess.run([MPIEXEC, "-n", str(ranks), sys.executable, *words], cwd=cwd, capture_output=True, text=True,
                          env=quiet(seconds), timeout=seconds + 20)  # fmt: skip


def quiet(seconds: float = SECONDS) -> dict[str, str]:
    """The environment of a job that takes no longer than this."""
    return {**os.environ, "MPIEXEC_TIMEOUT": str(int(seconds)), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

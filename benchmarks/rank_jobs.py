"""Run a benchmark's module on several ranks, of one thread each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def told_by_ranks(ranks: int, module: str, *words: str) -> Any:
    """Return the JSON that the first of ``ranks`` prints; exit with their errors if they fail."""
    beside = Path(sys.executable).with_name("mpiexec")
    command = [str(beside) if beside.exists() else "mpiexec", "-n", str(ranks), sys.executable, "-m", module, *words]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(ran.stderr)
    return json.loads(ran.stdout)

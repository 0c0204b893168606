"""A few mutants of rules are caught; ``python -m tests.mutate_rules`` tries all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.sweep(0)
def test_a_sample_of_mutants_is_caught() -> None:
    command = [sys.executable, "-m", "tests.mutate_rules", "reduction", "--own", "--sample", "15"]
    tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert "(100.0 %)" in tried.stdout

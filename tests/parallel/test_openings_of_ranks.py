"""What ranks open is kept, too: both halves of a step, and the parts of an update that is shared out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel import ranks_openings
from tests.parallel.mpi_jobs import ROOT, job, needs_mpi

pytestmark = needs_mpi


def test_ranks_open_a_step_again_from_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):  # one of them leads to the cache
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    ran = job(2, str(ROOT / "tests" / "parallel" / "ranks_openings.py"), str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    for rank in range(2):  # both halves for the usual batches, then for the last one
        found = json.loads((tmp_path / f"{rank}.json").read_text())["packed"]["sessions"]
        assert found == [True, True, False, True]
    kept = 0
    for kind in ranks_openings.KINDS:
        for rank in range(2):
            found = json.loads((tmp_path / f"{rank}.json").read_text())[kind]
            assert (found["same"], found["again"]) == (True, 0), (kind, rank)
        assert found["kept"] >= kept + 2, kind  # both halves; both ranks have one file
        kept = found["kept"]

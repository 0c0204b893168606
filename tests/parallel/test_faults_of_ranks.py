"""Whatever happens to one rank, all end, soon, and one sentence names it; what is asked of one alone is refused."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import onnx
import pytest

from gradgraph.backends.ort_native import library
from tests.parallel.mpi_jobs import ROOT, job, needs_mpi

pytestmark = needs_mpi


def run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return job(2, str(ROOT / "tests" / "parallel" / "ranks_faults.py"), name, str(folder), seconds=60)


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize(
    ("name", "said", "lines"),
    [
        ("raises", ["sample 30 cannot be read", "rank 1 failed; all ranks end"], 1),
        ("is_killed", [], 0),
        ("stops", ["rank 1 has not answered for 3 seconds"], 1),
        ("other_data", ["rank 1 differs from rank 0 in its data"], 1),
        ("other_step", ["rank 1 differs from rank 0 in its step"], 1),
        ("other_options", ["rank 1 differs from rank 0 in its options of fit"], 1),
        pytest.param(
            "other_kernels",
            ["rank 1 differs from rank 0 in its kernels"],
            1,
            marks=pytest.mark.skipif(not library.here().is_built, reason="no native kernels are built here"),
        ),
        ("other_weights", ["the weights of rank 1 differ from those of rank 0"], 1),
        ("nothing_counts", ["all labels of this batch are ignored on all ranks"], 1),
        ("diverges", ["the loss became nan in step 2"], 1),
        ("several_steps", ["named steps"], 1),
        ("other_ways", ["rank 1 differs from rank 0 in its parallel options"], 1),
        ("saved_alone", ["rank 1, which has", "call methods that save or read a sharded state"], 1),
        ("bound_together", ["magnitude_pruning", "remove shard_state"], 1),
        ("norms_of_sums", ["build the step without grad_norm"], 1),
        ("sums_alone", ["build the step without accumulate"], 1),
        ("loss_scale", ["compression with error feedback does not support float16"], 1),
        ("compares_samples", ["'info_nce' compares the samples of a batch with each other", "train in one process"], 1),
        ("ignored_by_one_of_several", ["'h_target' has the ignored label -100", "give each sample a label"], 1),
        ("no_norms", ["so there is nothing to synchronise; remove sync_batch_norm"], 1),
        ("norms_of_local_steps", ["local steps train different ones; remove sync_batch_norm or compress"], 1),
        ("other_norms", ["rank 1 differs from rank 0 in its parallel options"], 1),
        ("a_folder", ["this step has no gradient.onnx and apply.onnx", "separate=True"], 1),
    ],
)
def test_a_fault_ends_all_ranks_with_one_message(name: str, said: list[str], lines: int, tmp_path: Path) -> None:
    began = time.monotonic()
    ran = run(name, tmp_path)
    assert ran.returncode not in (0, 124) and time.monotonic() - began < 55, ran.stderr
    assert all(sentence in ran.stderr for sentence in said), ran.stderr
    assert ran.stderr.count("Traceback (most recent call last)") == lines, ran.stderr


@pytest.mark.parametrize(
    "name", ["callbacks", "draws", "lent", "overflow", "remembered", "remembered_rounds", "told_of_norms"]
)
def test_what_ranks_do_together(name: str, tmp_path: Path) -> None:
    ran = run(name, tmp_path)
    assert ran.returncode == 0, ran.stderr
    if name == "callbacks":
        onnx.checker.check_model(tmp_path / "trained.onnx")
        assert (tmp_path / "run.ckpt").exists()

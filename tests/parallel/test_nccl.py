"""GPUs whose gradients NCCL adds up: which one a rank takes, what is refused, and that the library is as it is called.

``test_same_as_one.py`` trains on stand-ins of them.
"""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

import gradgraph as gg
from gradgraph.errors import RuntimeUnavailableError
from gradgraph.parallel.nccl import gpu_of
from tests.kit.command_line import mlp
from tests.parallel.mpi_jobs import ROOT, job, needs_mpi

PYTHON = ROOT / ".venv-runtimes" / "nccl" / "bin" / "python"
INSTALL = "make .venv-runtimes/nccl/.installed"

CALLS = """
import inspect
import numpy as np
import onnxruntime as ort
import nccl.core as nccl
from cuda.core import Device, Event, Stream
from nccl.core.buffer import NcclBuffer

value = ort.OrtValue.ortvalue_from_numpy(np.ones((2, 3), np.float64))
seen = NcclBuffer(value)
assert (seen.ptr, seen.count, seen.dtype) == (value.data_ptr(), 6, nccl.NcclDataType.FLOAT64)
assert nccl.NcclDataType["FLOAT32"] == nccl.NcclDataType.from_numpy_dtype(np.dtype("float32"))
inspect.signature(nccl.Communicator.init).bind(2, 0, nccl.get_unique_id())
inspect.signature(nccl.Communicator.allreduce).bind(None, value, value, None, stream=None)
inspect.signature(nccl.Communicator.create_pre_mul_sum).bind(None, value, nccl.NcclDataType.FLOAT64)
assert callable(nccl.group)
assert callable(Device.set_current) and callable(Device.create_stream) and callable(Stream.record)
assert hasattr(Event, "is_done") and not callable(Event.is_done)
"""


@pytest.mark.skipif(not PYTHON.exists(), reason=f"nccl4py is not installed: {INSTALL}")
def test_nccl4py_has_what_is_called_and_reads_ortvalues() -> None:
    found = subprocess.run([PYTHON, "-c", CALLS], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("visible", "rank", "ranks", "gpu"),
    [(None, 3, 4, 3), ("0,1", 1, 2, 1), ("2", 0, 1, 0), ("GPU-8f3a", 1, 2, 0), ("", 0, 1, None), ("0,1", 1, 3, None)],
)
def test_each_rank_on_a_machine_takes_a_gpu_of_its_own(
    visible: str | None, rank: int, ranks: int, gpu: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if gpu is not None:
        assert gpu_of(rank, ranks) == gpu
        return
    with pytest.raises(RuntimeUnavailableError, match="ranks on this machine see"):
        gpu_of(rank, ranks)


REFUSED: dict[str, tuple[dict[str, Any], gg.RuntimeOptions, str]] = {
    "shared state": ({"shard_state": True}, gg.RuntimeOptions(), "shard_state is supported for ranks on the CPU only"),
    "norms": ({"sync_batch_norm": True}, gg.RuntimeOptions(), "sync_batch_norm is supported for ranks"),
    "compression": ({"told": "float16"}, gg.RuntimeOptions(), "compress is supported for ranks"),
    "graphs": ({}, gg.RuntimeOptions(cuda_graph=True), "CUDA graphs capture whole steps"),
    "no library": ({}, gg.RuntimeOptions(), "nccl4py, which sums gradients on GPUs, is not installed"),
}


@needs_mpi
@pytest.mark.parametrize("name", REFUSED)
def test_what_gpus_do_not_do_is_refused(name: str) -> None:
    from mpi4py import MPI

    from gradgraph.parallel.compressions import COMPRESSIONS
    from gradgraph.parallel.mpi_team import MpiTeam
    from gradgraph.runtime.execution.session import CPU, Placement

    ways, options, told = REFUSED[name]
    compress = COMPRESSIONS.typed(ways["told"]) if "told" in ways else None
    team = MpiTeam(MPI.COMM_SELF, 10.0, 0, **{k: v for k, v in ways.items() if k != "told"}, compress=compress)
    step = gg.build(mlp(), "cross_entropy", "sgd")
    with pytest.raises(RuntimeUnavailableError, match=told):
        team.opened(step, Placement((CPU,), "cuda"), options)


@needs_mpi
def test_a_rank_whose_gpu_does_not_start_is_named() -> None:
    program = """
import sys
from mpi4py import MPI
from tests.kit.command_line import mlp
import gradgraph as gg
from tests.parallel import far_memory
from gradgraph.runtime.execution.session import CPU, Placement
far_memory.use()
if MPI.COMM_WORLD.rank == 1:
    Placement.choose = lambda *_: Placement((CPU,))
gg.Trainer(gg.build(mlp(), "cross_entropy", "sgd"), parallel=gg.DataParallel(timeout=20))
"""
    ran = job(2, "-c", program)
    assert ran.returncode != 0 and "rank 1 trains on the CPU and rank 0 on the GPU" in ran.stderr, ran.stderr

"""MPI itself: whether it is available, whether this process is part of a job, and how a job ends if a rank fails."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from gradgraph.errors import RuntimeUnavailableError, shown

TOGETHER = 2.0  # if all ranks fail within these seconds, it is one failure

RANKS = "GRADGRAPH_RANKS"  # set by `gradgraph train --ranks` for the processes that it starts
# how launchers pass the size of a job: MPICH and Intel MPI, Open MPI, MVAPICH, Slurm, ours
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", RANKS)
_installed: list[Any] = []  # the communicator of the hook, once it is installed


def started_ranks() -> int:
    """Return the size of the job in which a launcher started this process; 1 if none did."""
    sizes = [os.environ.get(name, "") for name in _SIZES]
    return max((int(size) for size in sizes if size.isascii() and size.isdecimal()), default=1)


def library(initialize: bool = True) -> Any:
    """Return mpi4py's module ``MPI``.

    Args:
        initialize: whether importing it initialises MPI.

    Raises:
        RuntimeUnavailableError: if mpi4py is not installed or finds no MPI.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = initialize
        from mpi4py import MPI
    except ImportError:
        raise RuntimeUnavailableError(
            "mpi4py, which multi-process training requires, is not installed",
            remedy="pip install mpi4py mpich (on Windows impi-rt in place of mpich)",
        ) from None
    except RuntimeError as error:
        first = str(error).strip().splitlines()[:1]
        raise RuntimeUnavailableError(
            f"mpi4py finds no MPI ({shown(''.join(first))})",
            remedy="pip install mpich (on Windows impi-rt), or load the module of your cluster's MPI",
        ) from None
    return MPI


def world() -> Any:
    """Return the communicator of all processes of the job, and make unhandled exceptions in any process end all.

    Raises:
        RuntimeUnavailableError: as for :func:`library`, or if MPI does not support the launcher that started the
            processes.
    """
    comm = library().COMM_WORLD
    if comm.size == 1 and (started := started_ranks()) > 1:
        raise RuntimeUnavailableError(
            f"a launcher started {started} processes, but MPI does not connect them: each is a job of its own",
            remedy="launch them with the mpiexec of the MPI that mpi4py uses (with Slurm's srun, set its option mpi)",
        )
    if comm.size > 1 and not _installed:
        _installed.append(comm.Dup())
        sys.excepthook = _hook(sys.excepthook)
    return comm


def rank_here() -> int:
    """Return the rank of this process; 0 before :func:`world` has found several."""
    return int(_installed[0].rank) if _installed else 0


def end_together() -> bool:
    """Wait for the other ranks after a failure, at most ``TOGETHER`` seconds; return whether all of them failed, too.

    If so, all ranks exit by themselves, and rank 0 prints the error. Otherwise this rank prints it and calls
    :func:`end_all`.
    """
    if not _installed:
        return True
    arrived = _installed[0].Ibarrier()
    until = time.monotonic() + TOGETHER
    while not arrived.Test():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def finish(_code: int = 0) -> None:
    """Finalize MPI before a process exits early; all ranks must do so."""
    if _installed:
        library().Finalize()


def end_all(code: int) -> None:
    """Abort all processes of the job immediately."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    _installed[0].Abort(code)


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _hook(before: Hook) -> Hook:
    """Return an exception hook: one rank prints the error with the hook ``before``, then all ranks end."""

    def failed(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        together = end_together()
        if not together or rank_here() == 0:
            before(kind, error, at)
        if not together:
            print(f"rank {rank_here()} failed; all ranks end", file=sys.stderr)
            end_all(1)

    return failed

"""MPI itself: whether there is one, whether this process is part of a job, and how a job ends when a rank fails."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from gradgraph.errors import RuntimeUnavailableError, shown

TOGETHER = 2.0  # seconds within which all ranks must have failed, so that it is one failure

RANKS = "GRADGRAPH_RANKS"  # by which `gradgraph train --ranks` tells the processes that it starts
# how launchers tell a process the size of its job: MPICH and Intel MPI, Open MPI, MVAPICH, Slurm, ours
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", RANKS)
_installed: list[Any] = []  # the communicator of the hook, once it is installed


def started_ranks() -> int:
    """The size of the job that a launcher has started this process in; 1 where none has."""
    sizes = [os.environ.get(name, "") for name in _SIZES]
    return max((int(size) for size in sizes if size.isascii() and size.isdecimal()), default=1)


def library(initialize: bool = True) -> Any:
    """MPI of mpi4py.

    Args:
        initialize: take part in a job.

    Raises:
        RuntimeUnavailableError: there is no mpi4py, or it finds no MPI.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = initialize
        from mpi4py import MPI
    except ImportError:
        raise RuntimeUnavailableError(
            "mpi4py is not installed, by which processes train together",
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
    """All processes of the job, as mpi4py has them; from here on an exception on one ends all.

    Raises:
        RuntimeUnavailableError: as for :func:`library`, or a launcher and MPI do not understand each other.
    """
    comm = library().COMM_WORLD
    if comm.size == 1 and (started := started_ranks()) > 1:
        raise RuntimeUnavailableError(
            f"a launcher started {started} processes, and each of them is alone to MPI",
            remedy="start them by the mpiexec of the MPI that mpi4py uses (of Slurm's srun, by its option mpi)",
        )
    if comm.size > 1 and not _installed:
        _installed.append(comm.Dup())
        sys.excepthook = _hook(sys.excepthook)
    return comm


def rank_here() -> int:
    """The rank of this process where several train together, else 0."""
    return int(_installed[0].rank) if _installed else 0


def end_together() -> bool:
    """Call it when this process has failed; returns whether all others have, too.

    If so, each may end by itself, and the first one says why. If not, this one says it and calls :func:`end_all`.
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
    """Leave MPI, where all ranks do, before a process ends in the middle of something."""
    if _installed:
        library().Finalize()


def end_all(code: int) -> None:
    """End all processes of the job at once."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    _installed[0].Abort(code)


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _hook(before: Hook) -> Hook:
    """A hook for exceptions that nobody handles: one rank says it, and all end."""

    def failed(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        together = end_together()
        if not together or rank_here() == 0:
            before(kind, error, at)
        if not together:
            print(f"rank {rank_here()} failed; all ranks end", file=sys.stderr)
            end_all(1)

    return failed

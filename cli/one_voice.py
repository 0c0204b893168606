"""``gradgraph train`` in several processes: who speaks, and how all end where one fails."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from gradgraph.cli import output
from gradgraph.errors import ParallelError

if TYPE_CHECKING:
    from gradgraph.parallel.data_parallel import DataParallel

_TRIALS = {"dry_run": "--dry-run", "find_lr": "--find-lr", "overfit": "--overfit", "profile": "--profile"}


def join(arguments: Sequence[str]) -> None:
    """Let this process be one of those that a launcher has started: from now on the first one alone speaks."""
    if list(arguments[:1]) != ["train"] or not {"-h", "--help"}.isdisjoint(arguments):
        return
    from gradgraph.parallel.mpi import rank_here, started_ranks, world

    if started_ranks() > 1:
        world()
        output.talk.follows = rank_here() > 0


def begin_end(error: BaseException) -> str:
    """Begin to end a process that fails; returns what its message is to begin with.

    If all ranks fail, the first one alone says why. If this one alone does, it says which one it is.
    """
    mpi = sys.modules.get("gradgraph.parallel.mpi")
    if mpi is None or mpi.end_together():
        return ""
    output.talk.follows, output.talk.ends_all = False, True
    return "" if isinstance(error, ParallelError) else f"on rank {mpi.rank_here()}: "


def end(code: int) -> int:
    """End all ranks where this one has failed alone; leave MPI where all have."""
    mpi = sys.modules.get("gradgraph.parallel.mpi")
    if mpi is not None:
        (mpi.end_all if output.talk.ends_all else mpi.finish)(code)
    return code


def starts(ranks: int | None, given: Mapping[str, Any], model: Any, ctx: click.Context) -> bool:
    """Whether this process is to start the ranks of a run, and not to be one.

    Raises:
        click.UsageError: what is asked for runs in one process alone.
    """
    from gradgraph.parallel.mpi import started_ranks

    if max(ranks or 1, started_ranks()) == 1:
        return False
    if trial := next((option for name, option in _TRIALS.items() if given[name]), None):
        raise click.UsageError(f"{trial} runs in one process; leave --ranks out", ctx)
    if "-" in (str(given["data"]), str(model)):
        raise click.UsageError("stdin is read by one process; give several ranks a file", ctx)
    return started_ranks() == 1


def parallel(timeout: float, **ways: Any) -> DataParallel | None:
    """The ranks that this process is one of, if there are several; ``ways`` are further arguments."""
    from gradgraph.parallel.mpi import started_ranks

    if started_ranks() == 1:
        return None
    from gradgraph.parallel.data_parallel import DataParallel

    return DataParallel(timeout=timeout, **ways)

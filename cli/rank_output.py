"""``gradgraph train`` in several processes: only rank 0 prints, and all ranks exit when one fails."""

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
    """Join the other ranks if a launcher started ``train`` in several processes; then only rank 0 prints."""
    if list(arguments[:1]) != ["train"] or not {"-h", "--help"}.isdisjoint(arguments):
        return
    from gradgraph.parallel.mpi import rank_here, started_ranks, world

    if started_ranks() > 1:
        world()
        output.talk.follows = rank_here() > 0


def begin_end(error: BaseException) -> str:
    """Prepare to exit after an error, and return the prefix of the error message.

    If all ranks fail, only rank 0 prints the error, without a prefix. If a single rank fails, the prefix is its rank.
    """
    mpi = sys.modules.get("gradgraph.parallel.mpi")
    if mpi is None or mpi.end_together():
        return ""
    output.talk.follows, output.talk.ends_all = False, True
    return "" if isinstance(error, ParallelError) else f"on rank {mpi.rank_here()}: "


def end(code: int) -> int:
    """Abort all ranks if only this rank has failed; otherwise finalise MPI. Return the exit code ``code``."""
    mpi = sys.modules.get("gradgraph.parallel.mpi")
    if mpi is not None:
        (mpi.end_all if output.talk.ends_all else mpi.finish)(code)
    return code


def starts(ranks: int | None, given: Mapping[str, Any], model: Any, ctx: click.Context) -> bool:
    """Whether this process must launch the ranks of a run: several ranks are requested, and it is not one of them.

    Raises:
        click.UsageError: if an option does not support several ranks.
    """
    from gradgraph.parallel.mpi import started_ranks

    if max(ranks or 1, started_ranks()) == 1:
        return False
    if trial := next((option for name, option in _TRIALS.items() if given[name]), None):
        raise click.UsageError(f"{trial} runs in one process; omit --ranks", ctx)
    if "-" in (str(given["data"]), str(model)):
        raise click.UsageError("stdin can be read by one process only; give several ranks a file", ctx)
    return started_ranks() == 1


def parallel(timeout: float, **ways: Any) -> DataParallel | None:
    """Return ``DataParallel(timeout, **ways)`` for this rank; None if the run has a single process."""
    from gradgraph.parallel.mpi import started_ranks

    if started_ranks() == 1:
        return None
    from gradgraph.parallel.data_parallel import DataParallel

    return DataParallel(timeout=timeout, **ways)

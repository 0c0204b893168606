"""``gradgraph train`` in several processes: only rank 0 prints, and all ranks exit when one fails."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from gradgraph.cli import output
from gradgraph.errors import ParallelError

if TYPE_CHECKING:
    from gradgraph.runs.run_options import Run


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


def starts(run: Run, ctx: click.Context) -> bool:
    """Whether this process must launch the ranks of a run: several ranks are requested, and it is not one of them.

    Raises:
        click.UsageError: if an option does not support several ranks.
    """
    from gradgraph.parallel.mpi import started_ranks
    from gradgraph.runs.run_options import TRIALS

    if max(run.ranks or 1, started_ranks()) == 1:
        return False
    if trial := next((trial for trial in TRIALS if getattr(run, trial)), None):
        raise click.UsageError(f"--{trial.replace('_', '-')} runs in one process; omit --ranks", ctx)
    if "-" in (str(run.data), str(run.model)):
        raise click.UsageError("stdin can be read by one process only; give several ranks a file", ctx)
    return started_ranks() == 1

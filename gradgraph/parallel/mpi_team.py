"""Several processes over MPI as the team of a trainer.

All wait for each other at every step. Whoever waits looks at the clock: a rank that does not come is asked for by name
(a roll call that waiting ranks answer), and the run ends.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import onnxruntime as ort
from mpi4py import MPI

from gradgraph.errors import GradgraphError, ParallelError, RuntimeUnavailableError
from gradgraph.parallel.buckets import Buckets
from gradgraph.parallel.fingerprints import digest_of_state, digest_of_step
from gradgraph.parallel.halved_session import HalvedSession
from gradgraph.parallel.wide_gradients import widened
from gradgraph.runtime.execution.team import Team
from gradgraph.step.manifest import package_version

if TYPE_CHECKING:
    from gradgraph.runtime.execution.executor import Executor
    from gradgraph.runtime.execution.opened import OpenedStep
    from gradgraph.runtime.execution.part import Part
    from gradgraph.runtime.execution.session import Placement, RuntimeOptions
    from gradgraph.runtime.execution.shaped import Sizes
    from gradgraph.runtime.execution.state import State
    from gradgraph.step.step import Step

T = TypeVar("T")

AWAKE, LONG = 200, 1.0  # polls without rest, and seconds after which a wait is long
ROLL_CALL = 5.0  # seconds within which ranks that wait answer


class MpiTeam(Team):
    """All processes of a communicator.

    Args:
        comm: of mpi4py.
        timeout, check_every: as for ``DataParallel``.

    Attributes:
        usual: the terms of a mean over a batch on all ranks together, mostly: gradients are scaled by it before they
            are added up, and again only where the batch has others.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float, check_every: int) -> None:
        self.rank, self.ranks = comm.rank, comm.size
        self.usual = 1
        self._comm, self._roll = comm.Dup(), comm.Dup()
        self._timeout, self._check_every = timeout, check_every
        self._here = comm.Split_type(MPI.COMM_TYPE_SHARED).size  # processes on this machine
        self._buckets: Buckets | None = None
        self._steps = 0
        self._own, self._total = (0, 0), (0, 0)
        self._asks: tuple[bool, int | None] = (False, None)
        self._heard: tuple[bool, int | None] = (False, None)

    # --- the step -----------------------------------------------------------------------------------------------

    def opened(self, step: Step, placement: Placement, options: RuntimeOptions) -> tuple[Step, RuntimeOptions]:
        if placement.memory != "cpu":
            raise RuntimeUnavailableError(
                "several processes train on the CPU only",
                remedy="pass device='cpu', or leave parallel out",
                shell="add --device cpu, or leave --ranks out",
            )
        if options.threads is None:
            options = replace(options, threads=max(1, _cores() // self._here))
        if self._here > _cores():
            options = replace(options, spinning=False)
        return widened(step.apart()), options

    def session(self, opened: OpenedStep, part: Part, sizes: Sizes) -> HalvedSession:
        if self._buckets is None:  # one for all sizes of a batch
            self._buckets = Buckets(opened.definition, self.rank)
        return HalvedSession.of(opened, part, sizes, self._buckets, self)

    def counts(self, rows: int, counted: int) -> None:
        self._own = (0, 0) if self.spare else (rows, counted)

    def of_all(self, rows: int, counted: int) -> tuple[int, int]:
        return self._total

    def reduce(self, put_results: Callable[[], None]) -> None:
        """Add up the buckets of all ranks, and what each counts and asks for."""
        buckets = self._buckets
        assert buckets is not None
        over, signal = self._asks
        weight = buckets.scale(*self._own, self.usual)
        buckets.write([*_halved(self._own[0]), *_halved(self._own[1]), weight, over, signal == 2, signal == 15])
        put_results()
        for array in buckets.arrays:
            self._wait(self._comm.Iallreduce(MPI.IN_PLACE, array))
        found = buckets.read()
        self._total = round(found[0] * HALF + found[1]), round(found[2] * HALF + found[3])
        self._heard = found[5] > 0, 15 if found[7] else 2 if found[6] else None
        buckets.unscale(self._total, found[4], self.usual)

    def after_step(self, state: State) -> None:
        """Compare the states, every so many steps."""
        self._steps += 1
        if self._check_every and self._steps % self._check_every == 0:
            self.check_same(state)

    # --- what the loop asks -------------------------------------------------------------------------------------

    def begin(self, executor: Executor, facts: Mapping[str, Any], usual: int) -> None:
        versions = f"gradgraph {package_version()}, onnxruntime {ort.__version__}, Python {platform.python_version()}"
        known = {"versions": versions, "step": digest_of_step(executor.definition), **facts}
        everyone = self.gathered(known)
        for rank, others in enumerate(everyone):
            for what, value in others.items():
                if value != everyone[0][what]:
                    raise ParallelError(
                        f"rank {rank} has not the {what} of rank 0 ({value} and {everyone[0][what]}); start all ranks "
                        "with the same"
                    )
        executor.progress = self.agreed(executor.progress)
        for array in executor.state.seen().values():
            self._wait(self._comm.Ibcast(array.reshape(-1).view(np.uint8)))
        executor.stand_at(executor.state.read(), executor.progress)
        self.usual = max(1, sum(self.gathered(usual)))
        self._asks = self._heard = (False, None)

    def check_same(self, state: State) -> None:
        digests = self.gathered(digest_of_state(state))
        if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise ParallelError(
                f"the weights of {_named(others)} are no longer those of rank 0: the machines compute differently, or "
                "something on one rank alone has moved them; go on from the last checkpoint, on machines of one kind"
            )

    def heard(self, over: bool, signal: int | None) -> tuple[bool, int | None]:
        self._asks, heard = (over, signal), self._heard
        self._heard = (False, None)
        return heard

    def from_first(self, give: Callable[[], T]) -> T:
        found: Any = None
        problem: GradgraphError | None = None
        if self.is_first:
            try:
                found = give()
            except GradgraphError as error:
                problem = error
        found, problem = self.agreed((found, problem))
        if problem is not None:
            raise problem
        given: T = found
        return given

    def agreed(self, value: T) -> T:
        self._wait(self._comm.Ibarrier())
        given: T = self._comm.bcast(value if self.is_first else None)
        return given

    def gathered(self, value: T) -> list[T]:
        self._wait(self._comm.Ibarrier())
        found: list[T] = self._comm.allgather(value)
        return found

    # --- waiting ------------------------------------------------------------------------------------------------

    def _wait(self, request: MPI.Request) -> None:
        """Wait until all ranks have come.

        Raises:
            ParallelError: one has not, in time.
        """
        begin, polls = time.monotonic(), 0
        while not request.Test():
            polls += 1
            if polls < AWAKE:
                continue
            waited = time.monotonic() - begin
            if waited > self._timeout:
                self._call_the_roll(waited)
            if waited > LONG:
                self._answer()
            time.sleep(1e-3 if waited > LONG else 0)  # 0 lets another process have the core

    def _answer(self) -> set[int]:
        """Answer those who call the roll; returns who has answered or called."""
        found, status = set[int](), MPI.Status()
        while self._roll.Iprobe(status=status):
            calls = self._roll.recv(source=status.source)
            found.add(status.source)
            if calls:
                self._roll.isend(False, status.source)
        return found

    def _call_the_roll(self, waited: float) -> None:
        requests = [self._roll.isend(True, other) for other in range(self.ranks) if other != self.rank]
        here, until = {self.rank}, time.monotonic() + ROLL_CALL
        while time.monotonic() < until and len(here) < self.ranks:
            here |= self._answer()
            time.sleep(0.01)
        missing = [rank for rank in range(self.ranks) if rank not in here]
        if self.rank != min(here):  # which speaks, and ends all
            time.sleep(2 * ROLL_CALL)
        del requests
        who = _named(missing) if missing else "the message itself"
        raise ParallelError(
            f"{who} has not answered for {waited:.0f} seconds (after step {self._steps}); look at that process and its "
            "machine, or give a longer timeout"
        )


HALF = 1 << 12  # whole numbers of up to 36 bits travel as two that float32 holds


def _halved(count: int) -> tuple[int, int]:
    return count // HALF, count % HALF


def _cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

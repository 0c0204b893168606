"""Access to parts of the state that only other ranks have.

Inside a fit, a rank that needs some (the first one, which saves) asks while the others wait for it at their next
message. Outside, all ranks call the method that reads the state, and each waits until all have finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from gradgraph.errors import ParallelError, shown
from gradgraph.runtime.data.batch import Array

ASKED, LENT = 1, 2  # tags


class RemoteState:
    """The arrays that each rank shares with others on request.

    Args:
        comm: a communicator of its own.
        wait: waits for an MPI request.
        timeout: seconds to wait for a rank before the run fails.
        give: returns the array of a name, on this rank.

    Attributes:
        is_shared: parts of the state are on one rank only.
        is_open: a fit is running, so all others wait for a rank that asks.
    """

    def __init__(
        self, comm: MPI.Intracomm, wait: Callable[[MPI.Request], None], timeout: float, give: Callable[[str], Array]
    ) -> None:
        self.is_shared = self.is_open = False
        self._comm, self._wait, self._timeout, self._give = comm, wait, timeout, give

    def answer(self) -> None:
        """Send the requested arrays."""
        status = MPI.Status()
        while self._comm.Iprobe(tag=ASKED, status=status):
            names: list[str] = self._comm.recv(source=status.source, tag=ASKED)
            for name in names:
                self._comm.Send(_bytes(self._give(name)), status.source, LENT)

    def fetch(self, wanted: Sequence[tuple[int, str, Array]]) -> None:
        """Fill arrays from other ranks, each given by rank and name.

        Raises:
            ParallelError: one does not answer.
        """
        ranks = {rank: [name for other, name, _ in wanted if other == rank] for rank, _, _ in wanted}
        asked = [self._comm.isend(names, rank, ASKED) for rank, names in ranks.items()]
        for rank, name, array in wanted:
            self._receive(self._comm.Irecv(_bytes(array), rank, LENT), rank, name)
        MPI.Request.waitall(asked)

    def serve(self) -> None:
        """Outside of a fit, answer requests until all ranks have their arrays."""
        if self.is_shared and not self.is_open:
            self._wait(self._comm.Ibarrier())

    def _receive(self, request: Any, rank: int, name: str) -> None:
        begin = time.monotonic()
        while not request.Test():
            self.answer()  # another rank asks this one meanwhile
            if time.monotonic() - begin > self._timeout:
                raise ParallelError(
                    f"rank {rank}, which has '{shown(name)}', has not answered for {self._timeout:.0f} seconds; call "
                    "methods that save or read a sharded state on all ranks"
                )
            time.sleep(0)


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)

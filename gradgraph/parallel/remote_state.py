"""Access to parts of the state that only other ranks have.

During a fit, a rank that needs such parts (rank 0, to save a checkpoint) requests them while the others wait for it at
their next message. Otherwise all ranks must call the method that reads the state, and each waits until all have
finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from gradgraph.data.arrays.batch import Array
from gradgraph.errors import ParallelError, shown

ASKED, LENT = 1, 2  # tags of requests and replies


class RemoteState:
    """The arrays that each rank sends to others on request, through a communicator for these messages only.

    Args:
        wait: waits for an MPI request.
        timeout: seconds to wait for a rank before the run fails.
        give: returns this rank's array of a name.

    Attributes:
        is_shared: whether parts of the state are on one rank only.
        is_open: whether a fit is running, in which waiting ranks answer requests.
    """

    def __init__(
        self, comm: MPI.Intracomm, wait: Callable[[MPI.Request], None], timeout: float, give: Callable[[str], Array]
    ) -> None:
        self.is_shared = self.is_open = False
        self._comm, self._wait, self._timeout, self._give = comm, wait, timeout, give

    def answer(self) -> None:
        """Send the arrays that other ranks have requested."""
        status = MPI.Status()
        while self._comm.Iprobe(tag=ASKED, status=status):
            names: list[str] = self._comm.recv(source=status.source, tag=ASKED)
            for name in names:
                self._comm.Send(bytes_of(self._give(name)), status.source, LENT)

    def fetch(self, wanted: Sequence[tuple[int, str, Array]]) -> None:
        """Fill arrays with state from other ranks; ``wanted`` has the source rank, the name and the array of each.

        Raises:
            ParallelError: if a rank does not answer.
        """
        ranks = {rank: [name for other, name, _ in wanted if other == rank] for rank, _, _ in wanted}
        asked = [self._comm.isend(names, rank, ASKED) for rank, names in ranks.items()]
        for rank, name, array in wanted:
            self._receive(self._comm.Irecv(bytes_of(array), rank, LENT), rank, name)
        MPI.Request.waitall(asked)

    def serve(self) -> None:
        """Answer requests until all ranks have received their arrays; during a fit, do nothing."""
        if self.is_shared and not self.is_open:
            self._wait(self._comm.Ibarrier())

    def _receive(self, request: Any, rank: int, name: str) -> None:
        begin = time.monotonic()
        while not request.Test():
            self.answer()  # other ranks may wait for this one
            if time.monotonic() - begin > self._timeout:
                raise ParallelError(
                    f"rank {rank}, which has '{shown(name)}', has not answered for {self._timeout:.0f} seconds; call "
                    "methods that save or read a sharded state on all ranks"
                )
            time.sleep(0)


def bytes_of(array: Array) -> Array:
    """Return the bytes of an array, which share its memory."""
    return array.reshape(-1).view(np.uint8)

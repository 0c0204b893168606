"""``DataParallel``, the argument ``parallel=`` of a Trainer."""

from __future__ import annotations

from typing import Any

from gradgraph.arguments import FLAG, NUMBER, TEXT, WHOLE, Kind, checked
from gradgraph.errors import BuildError
from gradgraph.parallel import local_steps  # noqa: F401  (registers its compressions)
from gradgraph.parallel.compressions import COMPRESSIONS
from gradgraph.parallel.mpi import world
from gradgraph.runtime.execution.team import ALONE, Team

__all__ = ["COMPRESSIONS", "DataParallel"]

_POSITIVE = Kind("a number of seconds above zero", lambda value: NUMBER.fits(value) and value > 0)
_COUNT = Kind("a whole number, 0 or above", lambda value: WHOLE.fits(value) and value >= 0)


class DataParallel:
    """Synchronous data-parallel training in several processes over MPI, each on a share of every batch.

    The weights equal those of one process that trains on the whole batches, except for rounding, Dropout (whose masks
    differ between ranks) and BatchNormalization (which normalises over the samples of its own rank, unless
    ``sync_batch_norm`` is set). Start the script with ``mpiexec -n 4 python train.py``; without mpiexec, DataParallel
    has no effect.

    Args:
        timeout: seconds to wait for a rank before the run fails with an error that names the rank; must exceed the time
            that rank 0 needs for a checkpoint or a callback.
        check_every: compare the weights of all ranks after this many steps, and at the end of a fit; 0 disables this.
        shard_state: each rank keeps the optimizer state of its share of the weights and updates only these; then all
            ranks get the new weights (ZeRO, stage 1). ``save``, ``state_dict`` and similar methods must then be called
            on all ranks, except during a fit.
        sync_batch_norm: BatchNormalization normalises over the samples of all ranks, as in one process. This takes two
            more messages per step for each BatchNormalization that depends on another one.
        compress: gradient compression, a name or call such as ``"top_k(ratio=0.01)"``.
        comm: a communicator of mpi4py; by default all processes of the job.

    Raises:
        RuntimeUnavailableError: if mpi4py is not installed or finds no MPI.
    """

    @checked(timeout=_POSITIVE, check_every=_COUNT, shard_state=FLAG, sync_batch_norm=FLAG, compress=TEXT.or_none())
    def __init__(
        self,
        *,
        timeout: float = 600.0,
        check_every: int = 100,
        shard_state: bool = False,
        sync_batch_norm: bool = False,
        compress: str | None = None,
        comm: Any = None,
    ) -> None:
        if compress is not None:
            COMPRESSIONS.typed(compress)
            if shard_state:
                raise BuildError.of_options(
                    "gradient compression requires whole gradients, which shard_state does not send; "
                    "remove --compress or --shard-state"
                )
        self._comm = world() if comm is None else comm
        self._timeout, self._check_every = float(timeout), int(check_every)
        self._shard_state, self._sync_batch_norm, self._compress = shard_state, sync_batch_norm, compress

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return int(self._comm.rank)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return int(self._comm.size)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    def team(self) -> Team:
        """Return a new team for a trainer, with a communicator of its own."""
        if self.ranks == 1:
            return ALONE
        from gradgraph.parallel.mpi_team import MpiTeam  # requires MPI

        compress = None if self._compress is None else COMPRESSIONS.typed(self._compress)  # each has its own state
        return MpiTeam(
            self._comm,
            self._timeout,
            self._check_every,
            self._shard_state,
            self._sync_batch_norm,
            compress,
            self._compress or "",
        )


DataParallel.__doc__ = (DataParallel.__doc__ or "").rstrip() + "\n\n    Compressions:\n" + "".join(
    f"\n    - ``{name}``: {' '.join((make.__doc__ or '').split())}" for name, make in COMPRESSIONS.items()
)  # fmt: skip

"""The interface between a trainer and the ranks of a data-parallel run, implemented here for a single process.

``gradgraph.parallel`` implements it for several ranks. Each processes a part of every batch, and gradients are summed
before the update, so all ranks have the same state. Only rank 0 logs and writes files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from gradgraph.data.arrays.batch import Array
    from gradgraph.runtime.execution.binding import BoundSession
    from gradgraph.runtime.execution.part import Part
    from gradgraph.runtime.execution.session import Placement, RuntimeOptions
    from gradgraph.runtime.execution.shaped import Sizes
    from gradgraph.runtime.execution.state import State
    from gradgraph.step.step import Step

T = TypeVar("T")


class Team:
    """A team of one process, and the interface of larger teams: each method documents what several ranks do.

    Attributes:
        rank: rank of this process.
        ranks: number of processes.
        spare: whether the current batch has no samples for this rank, which then computes a dummy sample.
    """

    rank, ranks = 0, 1
    spare = False

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which logs and writes files."""
        return self.rank == 0

    @property
    def gpu(self) -> int:
        """The default GPU index of this process.

        Raises:
            RuntimeUnavailableError: if this machine has fewer GPUs than processes.
        """
        return 0

    def opened(self, step: Step, placement: Placement, options: RuntimeOptions) -> tuple[Step, RuntimeOptions]:
        """Return the step and the session options to open; several ranks split the step into gradients and update."""
        return step, options

    def session(self, step: Any, part: Part, sizes: Sizes) -> BoundSession | None:
        """Return a session that runs a ``StepSession`` jointly on all ranks; None to use an ordinary session."""
        return None

    def begin(self, session: Any, facts: Mapping[str, Any], usual: int) -> None:
        """Check that all ranks have the same ``facts`` (settings by message name), and broadcast rank 0's state.

        ``usual`` is the usual number of loss terms in this rank's part of a batch.
        """

    def meet(self, state: State) -> None:
        """Average the weights of all ranks after local steps, before the state is read."""

    def check_same(self, state: State) -> None:
        """Check that all ranks have the same state."""

    def lend(self) -> None:
        """Send rank 0 the tensors that it requests while it saves a checkpoint."""

    def completed(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the state values by name, with accumulated gradients summed over all ranks."""
        return dict(values)

    def kept(self, values: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the content of a checkpoint: the complete state, and the arrays that differ between ranks."""
        return dict(values), {}

    def end(self, state: State) -> None:
        """Wait until all ranks have finished ``fit``, while serving their requests for parts of the state."""

    def counts(self, rows: int, counted: int) -> None:
        """Set the numbers of samples (``rows``) and of loss terms (``counted``) of this rank in the next step."""

    def of_all(self, rows: int, counted: int) -> tuple[int, int]:
        """Return the numbers of samples and loss terms of the last step, summed over all ranks."""
        return rows, counted

    def heard(self, over: bool, signal: int | None) -> tuple[bool, int | None]:
        """Return whether any rank requested a stop, and the signal that any rank received, as of the last step.

        ``over`` and ``signal`` are the values of this rank, sent to the other ranks with the next step.
        """
        return over, signal

    def from_first(self, give: Callable[[], T]) -> T:
        """Call ``give`` on rank 0 only, and return its result (or raise its error) on all ranks."""
        return give()

    def agreed(self, value: T) -> T:
        """Return the value of rank 0."""
        return value

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        return [value]


ALONE = Team()


@runtime_checkable
class Parallel(Protocol):
    """A strategy for training in several processes, such as ``gradgraph.DataParallel``."""

    def team(self) -> Team:
        """Return the team that this process belongs to."""
        ...

"""The processes that train one model together, as a trainer sees them: one, for which there is nothing to do.

``gradgraph.parallel`` has the team of several. Each takes a part of every batch; what they learn of it is put together
before the weights move, so that the state is the same on all. The first of them alone speaks and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from gradgraph.runtime.data.batch import Array
    from gradgraph.runtime.execution.binding import BoundSession
    from gradgraph.runtime.execution.part import Part
    from gradgraph.runtime.execution.session import Placement, RuntimeOptions
    from gradgraph.runtime.execution.shaped import Sizes
    from gradgraph.runtime.execution.state import State
    from gradgraph.step.step import Step

T = TypeVar("T")


class Team:
    """One process alone. What several do instead stands beside each method.

    Attributes:
        rank, ranks: which of how many this is.
        spare: the batch at hand is none of this process's: it computes it, and it does not count.
    """

    rank, ranks = 0, 1
    spare = False

    @property
    def is_first(self) -> bool:
        """Whether this one speaks and writes."""
        return self.rank == 0

    @property
    def gpu(self) -> int:
        """The number of the GPU that this process trains on, where nobody names one.

        Raises:
            RuntimeUnavailableError: there are fewer GPUs than processes on this machine.
        """
        return 0

    def opened(self, step: Step, placement: Placement, options: RuntimeOptions) -> tuple[Step, RuntimeOptions]:
        """The step as it is run here, in two halves, and the settings of its sessions."""
        return step, options

    def session(self, opened: Any, part: Part, sizes: Sizes) -> BoundSession | None:
        """A session of an ``OpenedStep`` that does steps together; None for an ordinary one."""
        return None

    def begin(self, executor: Any, facts: Mapping[str, Any], usual: int) -> None:
        """Compare what is to be the same on all, and give all the state of the first.

        Args:
            executor: an ``Executor``.
            facts: by what a message calls them.
            usual: the terms that a mean over this one's share of a batch mostly has.
        """

    def meet(self, state: State) -> None:
        """Put together what each has learnt alone, before it is looked at."""

    def check_same(self, state: State) -> None:
        """See that all have the same state."""

    def lend(self) -> None:
        """Give the first what it asks of the state, while it saves."""

    def completed(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """The whole state, with what each has that is yet to be put together."""
        return dict(values)

    def kept(self, values: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """The content of a checkpoint: the whole state, and beside it the arrays that each has for itself."""
        return dict(values), {}

    def end(self, state: State) -> None:
        """Wait until all are at the end of a fit: until then, each may ask for parts of the state."""

    def counts(self, rows: int, counted: int) -> None:
        """Say how many samples the next step has here, and how many terms a mean over it has."""

    def of_all(self, rows: int, counted: int) -> tuple[int, int]:
        """These numbers of the last step, over all."""
        return rows, counted

    def heard(self, over: bool, signal: int | None) -> tuple[bool, int | None]:
        """Whether any asks to stop, or was sent a signal: as all heard it with the last step."""
        return over, signal

    def from_first(self, give: Callable[[], T]) -> T:
        """The result of ``give``, or its error: the first one calls it, and all have what it gives."""
        return give()

    def agreed(self, value: T) -> T:
        """The value of the first."""
        return value

    def gathered(self, value: T) -> list[T]:
        """The values of all."""
        return [value]


ALONE = Team()


@runtime_checkable
class Parallel(Protocol):
    """A way to train in several processes, as ``gradgraph.DataParallel`` is one."""

    def team(self) -> Team:
        """The team that this process belongs to."""
        ...

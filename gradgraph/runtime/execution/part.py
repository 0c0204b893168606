"""One train graph of an opened step: what it takes and gives, its hyperparameters, and its sessions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import onnx

from gradgraph.errors import BuildError
from gradgraph.optim.schedules import rates_end
from gradgraph.runtime.execution.binding import BoundSession, Ports
from gradgraph.runtime.execution.rates import Rates
from gradgraph.runtime.execution.shaped import ShapedSessions, Sizes
from gradgraph.step.manifest import BATCH_WEIGHT, LEARNING_RATE, UPDATE, Manifest, column


def check_accumulates(accumulate: int | None, parts: Iterable[Part]) -> None:
    """Raise BuildError if the weights are to move after so many batches, and none of these steps adds up gradients."""
    if accumulate is not None and not any(UPDATE in part.rates.defaults for part in parts):
        raise BuildError(
            "this step moves the weights after each batch",
            remedy="build it with gradgraph.build(..., accumulate=True)",
            shell="build it with --accumulate",
        )


class Part:
    """A step that is the only one (its name is "" then), or one of several with names.

    Args:
        name: of the step.
        manifest: of all of them.
        model: its train graph.
        make: a session of it for the given sizes.

    Attributes:
        specs: what a batch of it holds.
        rates: its hyperparameters.
        reports_rate: its learning rate follows a schedule in the graph, and each step gives it.
        ends: the number of updates after which its learning rates are 0 for good; None where they are not.
        counter: the state that counts them.
        training: the sessions that do steps.
    """

    def __init__(
        self, name: str, manifest: Manifest, model: onnx.ModelProto, make: Callable[[Part, Sizes], BoundSession]
    ) -> None:
        spec = manifest.parts[name]
        self.name, self.model = name, model
        self.specs = manifest.specs_of(name)
        self.rates = Rates(spec.hyperparameters)
        self.reports_rate = column(name, LEARNING_RATE) in spec.reports
        counter = column(name, "step")
        counts = counter in spec.writes and any(s.name == counter and s.kind == "counter" for s in manifest.state)
        fed = LEARNING_RATE in spec.hyperparameters
        self.ends, self.counter = rates_end(spec.optimizer) if counts and not fed else None, counter
        self._manifest, self._make = manifest, make
        self.close_sessions()

    @functools.cached_property
    def ports(self) -> Ports:
        """The results, the next values of the state, the hyperparameters and the sums of the train graph."""
        spec = self._manifest.parts[self.name]
        moved = set(spec.writes)
        next_of = {s.name: s.next for s in self._manifest.state if s.name in moved}
        return Ports(spec.reported(self.name), next_of, self.rates.constants, spec.columns_of_sums(self.name))

    def told_to_add_up(self, moves: bool, counted: int) -> dict[str, float]:
        """Values that a run of this step is fed where it adds up gradients.

        Args:
            moves: whether the weights move by the sums.
            counted: the terms of its loss.
        """
        known = self.rates.defaults
        told = {UPDATE: float(moves), BATCH_WEIGHT: float(counted)}
        return {name: value for name, value in told.items() if name in known}

    def close_sessions(self) -> None:
        """Close all sessions. The next step opens them for its own sizes."""
        self.training: ShapedSessions[BoundSession] = ShapedSessions(self.specs, lambda sizes: self._make(self, sizes))

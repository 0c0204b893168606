"""The sessions of one train graph of a step, with its inputs, outputs and hyperparameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import onnx

from gradgraph.errors import BuildError
from gradgraph.optim.schedules import rates_end
from gradgraph.runtime.execution.binding import BoundSession, Ports
from gradgraph.runtime.execution.gathering import Shapes
from gradgraph.runtime.execution.rates import Rates
from gradgraph.runtime.execution.shaped import ShapedSessions, Sizes
from gradgraph.step.manifest import BATCH_WEIGHT, LEARNING_RATE, UPDATE, Manifest, column


def check_accumulates(accumulate: int | None, parts: Iterable[Part]) -> None:
    """Raise BuildError if gradients should be accumulated, but none of ``parts`` supports this.

    ``accumulate`` is the number of batches per update; None for no accumulation.
    """
    if accumulate is not None and not any(UPDATE in part.rates.defaults for part in parts):
        raise BuildError(
            "this step was built without gradient accumulation: it updates the weights after each batch",
            remedy="build it with gradgraph.build(..., accumulate=True)",
            shell="build it with --accumulate",
        )


class Part(ShapedSessions[BoundSession]):
    """The training sessions of one of the named steps of a step folder, or of its only step (with the name "").

    Attributes:
        gathered: shapes of the inputs whose rows sessions created later gather.
        reports_rate: whether the learning rate follows a schedule in the graph, and is an output of each step.
        ends: the number of updates after which all learning rates stay 0; None if they do not.
        counter: name of the state tensor that counts updates.
    """

    def __init__(
        self, name: str, manifest: Manifest, model: onnx.ModelProto, make: Callable[[Part, Sizes], BoundSession]
    ) -> None:
        spec = manifest.parts[name]
        self.name, self.model, self.specs = name, model, manifest.specs_of(name)
        super().__init__(self.specs, functools.partial(make, self))
        self.rates = Rates(spec.hyperparameters)
        self.reports_rate = column(name, LEARNING_RATE) in spec.reports
        counter = column(name, "step")
        counts = counter in spec.writes and any(s.name == counter and s.kind == "counter" for s in manifest.state)
        fed = LEARNING_RATE in spec.hyperparameters
        self.ends, self.counter = rates_end(spec.optimizer) if counts and not fed else None, counter
        self._manifest = manifest

    def close_sessions(self) -> None:
        super().close_sessions()
        self.gathered: Shapes = {}

    @functools.cached_property
    def ports(self) -> Ports:
        """The inputs and outputs of the train graph other than its batch."""
        spec = self._manifest.parts[self.name]
        moved = set(spec.writes)
        next_of = {s.name: s.next for s in self._manifest.state if s.name in moved}
        return Ports(spec.reported(self.name), next_of, self.rates.constants, spec.columns_of_sums(self.name))

    def told_to_add_up(self, moves: bool, counted: int) -> dict[str, float]:
        """Return the values of the extra inputs for gradient accumulation, by name; empty if the step has none.

        Args:
            moves: whether this run also updates the weights.
            counted: the number of loss terms in the batch.
        """
        known = self.rates.defaults
        values = {UPDATE: float(moves), BATCH_WEIGHT: float(counted)}
        return {name: value for name, value in values.items() if name in known}

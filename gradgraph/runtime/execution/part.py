"""One train graph of an opened step: what it takes and gives, its hyperparameters, and its sessions."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from gradgraph.runtime.execution.binding import BoundSession
from gradgraph.runtime.execution.rates import Rates
from gradgraph.runtime.execution.shaped import ShapedSessions, Sizes
from gradgraph.step.manifest import Manifest


class Part:
    """A step that is the only one (its name is "" then), or one of several with names.

    Args:
        name: of the step.
        manifest: of all of them.
        model: its train graph.
        make: a session of it for the given sizes.

    Attributes:
        specs: what a batch of it holds.
        results: the names of loss and metrics, with the outputs that they are.
        measures: the columns that are made of sums.
        next_of: each state tensor that it moves, with the output that is its next value.
        rates: what its hyperparameters are.
        training: the sessions that do steps.
    """

    def __init__(
        self, name: str, manifest: Manifest, model: onnx.ModelProto, make: Callable[[Part, Sizes], BoundSession]
    ) -> None:
        spec = manifest.parts[name]
        self.name, self.model = name, model
        self.specs = manifest.specs_of(name)
        self.results, self.measures = spec.reported(name), spec.columns_of_sums(name)
        moved = set(spec.writes)
        self.next_of = {s.name: s.next for s in manifest.state if s.name in moved}
        self.rates = Rates(spec.hyperparameters)
        self._make = make
        self.training = self._sessions()

    def _sessions(self) -> ShapedSessions[BoundSession]:
        return ShapedSessions(self.specs, lambda sizes: self._make(self, sizes))

    def forget_sessions(self) -> None:
        """Let sessions be made anew, for the sizes of who trains next."""
        self.training = self._sessions()

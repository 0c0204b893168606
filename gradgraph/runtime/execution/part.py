"""One train graph of an opened step: what it takes and gives, its hyperparameters, and its sessions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import onnx

from gradgraph.optim.schedules import rates_end
from gradgraph.runtime.execution.binding import BoundSession, Ports
from gradgraph.runtime.execution.rates import Rates
from gradgraph.runtime.execution.shaped import ShapedSessions, Sizes
from gradgraph.step.manifest import LEARNING_RATE, Manifest, column


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
        self.ends, self.counter = rates_end(spec.optimizer) if counts else None, counter
        self._manifest, self._make = manifest, make
        self.close_sessions()

    @functools.cached_property
    def ports(self) -> Ports:
        """The results, the next values of the state, the hyperparameters and the sums of the train graph."""
        spec = self._manifest.parts[self.name]
        moved = set(spec.writes)
        next_of = {s.name: s.next for s in self._manifest.state if s.name in moved}
        return Ports(spec.reported(self.name), next_of, self.rates.constants, spec.columns_of_sums(self.name))

    def close_sessions(self) -> None:
        """Close all sessions. The next step opens them for its own sizes."""
        self.training: ShapedSessions[BoundSession] = ShapedSessions(self.specs, lambda sizes: self._make(self, sizes))

"""The session of a step in two halves, with an all-reduce between gradient.onnx and apply.onnx."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import onnxruntime as ort

from gradgraph.data.arrays.batch import Array, Feed
from gradgraph.parallel.accumulated import rate_alone
from gradgraph.parallel.buckets import Buckets
from gradgraph.parallel.joint_norms import JointNorms, Message
from gradgraph.parallel.segments import SegmentedGradient
from gradgraph.parallel.sharded import ShardedUpdate
from gradgraph.runtime.execution.binding import BoundSession, Ports
from gradgraph.runtime.execution.gathering import ROWS, GatheringSession
from gradgraph.runtime.execution.ort_values import to_ortvalue
from gradgraph.step.finishes import finished
from gradgraph.step.manifest import BATCH_WEIGHT, LEARNING_RATE, UPDATE

if TYPE_CHECKING:
    from gradgraph.runtime.execution.part import Part
    from gradgraph.runtime.execution.shaped import Sizes
    from gradgraph.runtime.execution.state import State
    from gradgraph.runtime.execution.step_session import StepSession


Gradient: TypeAlias = BoundSession | SegmentedGradient


class Adding(Protocol):
    """The interface of a team of ranks that a ``SplitSession`` uses."""

    def reduce(self, put_results: Callable[[], None], due: bool) -> None:
        """Sum the buckets of all ranks, after ``put_results`` has written this rank's results into the message.

        Gradients stay on their rank unless ``due``, that is, unless the weights are updated after this batch.
        """

    def after_step(self, state: State) -> None:
        """Run checks and exchanges that are due after a step, such as a comparison of all ranks' states."""

    def sharded(self, step: StepSession) -> ShardedUpdate | None:
        """Return this rank's part of the update, or None if updates are not sharded."""

    @property
    def joint_norms(self) -> JointNorms | None:
        """The gradient graph and its messages if norms use the samples of all ranks, else None."""

    @property
    def keeps_gradients(self) -> bool:
        """Whether the gradients of a batch stay on their rank until an update is due."""
        ...

    def tell(self, told: Sequence[tuple[Message, Array, Array]]) -> None:
        """Exchange the sums of norms between all ranks: entries are (message, array to send, array to receive)."""


class SplitSession(BoundSession):
    """The session of apply.onnx; each run executes gradient.onnx and the all-reduce first."""

    def __init__(
        self,
        given: tuple[Any, ...],
        gradient: Gradient,
        columns: Iterable[str],
        buckets: Buckets,
        team: Adding,
        shards: ShardedUpdate | None,
        host: Mapping[str, ort.OrtValue],
    ) -> None:
        super().__init__(*given)
        self._shards, self._host = shards, host
        self._due: ort.OrtValue | None = None
        self._rate: ort.InferenceSession | None = None  # computes a scheduled learning rate if no update is due
        self._keeps = True  # whether a batch with a loss of NaN leaves the state unchanged
        self._gradient, self._buckets, self._team = gradient, buckets, team
        self._columns = list(columns)
        self.numbers = dict.fromkeys(self._columns, 0.0)  # in the order of the columns
        self.measures, self.sums, self.gathers = gradient.measures, gradient.sums, gradient.gathers

    @classmethod
    def of(cls, step: StepSession, part: Part, sizes: Sizes, buckets: Buckets, team: Adding) -> SplitSession:
        """Open both halves for batches of these sizes."""
        manifest, halves, state, ports = step.manifest, step.definition.separate, step.state, part.ports
        spec = manifest.separate
        assert spec is not None
        nexts = {s.name: s.next for s in manifest.state}
        memory = {**buckets.gradients, **{nexts[n]: to_ortvalue(a) for n, a in buckets.moved.items()}}
        memory |= {nexts[name]: to_ortvalue(after) for name, (_, after) in buckets.draws.items()}
        if spec.weight:
            memory[spec.weight] = to_ortvalue(buckets.weight)
        draws = {name: to_ortvalue(here) for name, (here, _) in buckets.draws.items()}
        reports = {n: o for n, o in ports.results.items() if o in manifest.reports}
        first = Ports({n: o for n, o in ports.results.items() if n not in reports},
                      constants={**ports.constants, **draws}, measures=ports.measures, memory=memory)  # fmt: skip
        gradient = _gradient(step, part, sizes, first, team)
        counted = buckets.weight if spec.weight else buckets.counted
        fed = {name: to_ortvalue(counted) for name in (spec.weight, BATCH_WEIGHT) if name}
        shards = team.sharded(step)
        constants = {**ports.constants, **fed, **buckets.applied}
        apply, moved = halves["apply"], list(spec.apply.writes)
        if shards is not None:
            shards.open(step, constants)
            apply, moved, constants = shards.last, shards.moved(moved), {**constants, **shards.values}
        idle = {} if shards is None else shards.idle
        second = Ports(reports, {n: nexts[n] for n in moved}, constants, memory=idle)
        session, safe = step.half(apply, {}, second.next_of)
        made = cls((session, state, second, safe), gradient, first.results, buckets, team, shards, {**draws, **fed})
        made._due = ports.constants[UPDATE] if team.keeps_gradients else None
        made._keeps = step.check_loss
        if team.keeps_gradients and LEARNING_RATE in reports and (alone := rate_alone(apply)) is not None:
            made._rate, _ = step.half(alone, {}, {})
        return made

    def run(self, feeds: Mapping[str, Feed], options: ort.RunOptions | None = None) -> None:
        """Run a step together with all ranks; afterwards the updated state is the same on all ranks.

        Raises:
            DataError: if all labels of the batch are ignored.
            ParallelError: if a rank does not respond or has a different state.
            ModelError, TerminatedError: as for ``BoundSession.run``.
        """
        buckets, state, gradient = self._buckets, self._state, self._gradient
        buckets.draw_from(state.seen(buckets.draws))
        first, second = self._of_halves(feeds)
        gradient.run(first, options)
        sums = list(gradient.sums.values())
        due = self._due is None or float(self._due.numpy()) > 0.5
        self._team.reduce(lambda: buckets.put_results(gradient.numbers, sums, self._columns), due)
        if due:
            self._update(second, options)
        elif self._rate is not None:
            counters = state.seen([i.name for i in self._rate.get_inputs()])
            self.numbers[LEARNING_RATE] = float(np.asarray(self._rate.run([LEARNING_RATE], counters)[0]))
        self.numbers.update(buckets.get_results(self._columns, sums))
        self._is_undone = not due and self._keeps and not math.isfinite(self.numbers["loss"])
        if self._is_undone:
            return
        buckets.settle(due)
        for name, array in {**buckets.moved, **buckets.drawn()}.items():
            state.put(name, array)
        self._team.after_step(state)

    def _of_halves(self, feeds: Mapping[str, Feed]) -> tuple[Mapping[str, Feed], Mapping[str, Feed]]:
        """Return the inputs to bind for gradient.onnx and apply.onnx; devices copy them when bound."""
        if self._state.on_cpu:
            return feeds, {}
        anew = {**feeds, **self._host}
        first, second = ({n: v for n, v in anew.items() if n in half.inputs} for half in (self._gradient, self))
        return first, second

    def _update(self, feeds: Mapping[str, Feed], options: ort.RunOptions | None) -> None:
        if self._shards is not None:
            self._shards.before_update(options)
        super().run(feeds, options)
        if self._shards is not None:
            self._shards.after_update(self._buckets)

    def results(self) -> dict[str, Array]:
        """Return loss and metrics over all ranks, by name."""
        found = {name: np.asarray(value, np.float32) for name, value in self.numbers.items()}
        if self.measures:
            found |= {name: np.asarray(value) for name, value in finished(self.measures, self.sums).items()}
        return found

    def release(self) -> None:
        self._gradient.release()
        super().release()


def _gradient(step: StepSession, part: Part, sizes: Sizes, ports: Ports, team: Adding) -> Gradient:
    """Open the session of gradient.onnx, which reads frozen weights as the session of a single process does."""
    spec, packs = step.manifest.separate, step.packs_for(part, sizes)
    assert spec is not None
    if (joint := team.joint_norms) is not None:
        model = step.opener.lowered_half(joint.gradient, sizes)
        return SegmentedGradient(step, model, joint.messages, spec.weight, ports, team.tell, packs)
    session, _ = step.half(step.definition.separate["gradient"], sizes, {}, packs, part.gathered)
    if any(i.name == ROWS for i in session.get_inputs()):
        return GatheringSession(session, part.gathered, step.state, ports, frozenset())
    return BoundSession(session, step.state, ports)

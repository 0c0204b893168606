"""One rank's part of a sharded update, with the communication before and after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime as ort

from gradgraph.parallel.buckets import Buckets
from gradgraph.parallel.compressions import Messages
from gradgraph.parallel.remote_state import bytes_of
from gradgraph.parallel.update_parts import NOTHING, Shards
from gradgraph.runtime.execution.binding import BoundSession, Ports
from gradgraph.runtime.execution.ort_values import to_ortvalue

if TYPE_CHECKING:
    from gradgraph.runtime.execution.step_session import StepSession


class ShardedUpdate:
    """The part of an update that one rank runs.

    Args:
        shards: the assignment of weights to ranks.

    Attributes:
        last: the model that updates the weights of this rank.
        values: inputs of ``last`` that earlier messages exchange, by name.
        idle: a buffer for the only output of ``last``, by its name, if this rank updates no weights; else empty.
    """

    def __init__(self, shards: Shards, rank: int, team: Messages, step: StepSession) -> None:
        self.last: onnx.ModelProto = shards.last(rank)
        self._shards, self._rank, self._team, self._state = shards, rank, team, step.state
        gradients = step.manifest.separate
        assert gradients is not None
        self._gradients = gradients.gradients
        self._told = {name: np.zeros(told.shape, told.dtype) for name, told in shards.told.items()}
        self.idle = {o.name: to_ortvalue(np.zeros((), np.float32)) for o in self.last.graph.output if o.name == NOTHING}
        self.values: dict[str, ort.OrtValue] = {name: to_ortvalue(array) for name, array in self._told.items()}
        self._before: list[BoundSession | None] = []
        mine = {stand_in: weight for weight, stand_in in step.manifest.averages.items()}
        self._rounds: list[dict[str, str]] = [{}, {}]  # of messages after the update: tensor → its weight
        for name in shards.gathered:
            self._rounds[name in mine][name] = mine.get(name, name)

    def moved(self, names: Iterable[str]) -> list[str]:
        """Return the names of the state tensors that this rank updates, including tensors without an owner."""
        return [name for name in names if self._shards.owners.get(name, self._rank) == self._rank]

    def open(self, step: StepSession, constants: Mapping[str, ort.OrtValue]) -> None:
        """Open sessions for the parts before ``last``, which compute the exchanged values."""
        for level in range(self._shards.levels):
            model = self._shards.before(level, self._rank)
            outputs = {o.name: self.values[o.name] for o in model.graph.output}
            if not outputs:
                self._before.append(None)
                continue
            session, _ = step.half(model, {}, {})
            ports = Ports(constants={**constants, **self.values}, memory=outputs)
            self._before.append(BoundSession(session, step.state, ports))

    def before_update(self, options: ort.RunOptions | None) -> None:
        """Compute and exchange the values that all ranks need for the update."""
        for level, session in enumerate(self._before):
            if session is not None:
                session.run({}, options)
            names = [n for n, told in self._shards.told.items() if told.level == level]
            own = [self._shards.told[n].owner == self._rank for n in names]
            parts = [
                self._told[n].ravel() if o else np.zeros(self._told[n].size) for n, o in zip(names, own, strict=True)
            ]
            message = np.concatenate(parts).astype(np.float64)
            self._team.all_reduce(message)
            first = 0
            for name in names:
                array = self._told[name]
                array[...] = message[first : first + array.size].reshape(array.shape)
                first += array.size

    def after_update(self, buckets: Buckets) -> None:
        """Send the new weights and their averages to all ranks, using the memory of the gradients."""
        for names in filter(None, self._rounds):
            places = {n: buckets.views[self._gradients[weight]] for n, weight in names.items()}
            owners = self._shards.owners
            for name in (n for n in names if owners[n] == self._rank):
                array = self._state.seen([name])[name]
                bytes_of(places[name])[: array.nbytes] = bytes_of(array)
            for part in buckets.parts:
                if part.gradients.size:
                    self._team.all_gather(part.gradients, part.counts)
            for name in (n for n in names if owners[n] != self._rank):
                spec = self._state.specs[name]
                array = self._state.seen([name])[name]
                bytes_of(array)[...] = bytes_of(places[name])[: spec.nbytes]

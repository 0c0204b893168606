"""Links: stages of a train graph between backward pass and optimizer, such as loss scaling or accumulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from gradgraph.building.step_state import Slot, StepState
from gradgraph.graph.builder import Var
from gradgraph.graph.weight_layouts import carry_layout
from gradgraph.optim.transform import Vars


@dataclass(frozen=True)
class Weights:
    """The trained weights.

    Attributes:
        params: the weights in the model.
        start: the initial values, in init.onnx.
        old: the values that the optimizer updates: ``params``, or float32 copies of them.
    """

    params: Sequence[ir.Value]
    start: Vars
    old: Vars

    def some(self, members: Sequence[int]) -> Weights:
        """Return the weights at these indices."""
        return Weights(
            [self.params[i] for i in members], [self.start[i] for i in members], [self.old[i] for i in members]
        )


Update = Callable[[Weights, Vars], list[Var]]  # weights and gradients -> new weights


class Link:
    """A stage between backward pass and optimizer; by default, it changes nothing."""

    def gradients(self, gradients: Vars) -> Vars:
        """Return the gradients, in the order of the trained weights, after this stage."""
        return gradients

    def around(self, update: Update) -> Update:
        """Return an update that wraps ``update``."""
        return update


class MasterWeights(Link):
    """A link that keeps float32 master copies of float16 weights.

    The optimizer updates the copies, which are then rounded to float16.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state

    def around(self, update: Update) -> Update:
        state, op = self._state, self._state.op

        def rounded(weights: Weights, gradients: Vars) -> list[Var]:
            narrow = [p.dtype == ir.DataType.FLOAT16 for p in weights.params]
            start, old = list(weights.start), list(weights.old)
            for i, p in enumerate(weights.params):
                if narrow[i]:
                    start[i] = state.start.cast(weights.start[i], ir.DataType.FLOAT)
                    old[i] = state.new(f"{p.name}.master", ir.DataType.FLOAT, start[i].shape or ())
                    carry_layout(p, old[i].value)
            new = update(replace(weights, start=start, old=old), gradients)
            rows = zip(old, new, start, narrow, strict=True)
            state.slots += [Slot(was.value, now, first) for was, now, first, is_narrow in rows if is_narrow]
            return [op.cast(now, p.dtype or now.dtype) for p, now in zip(weights.params, new, strict=True)]

        return rounded

"""Gradient accumulation: sums the gradients of several batches until an update is due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.building.links import Link, Update, Weights
from gradgraph.building.objective_results import Written
from gradgraph.building.step_state import Slot, StepState
from gradgraph.graph.builder import Var, all_of
from gradgraph.optim.modifiers import global_norm
from gradgraph.optim.transform import Vars
from gradgraph.step.manifest import BATCH_WEIGHT, UPDATE


class Accumulation(Link):
    """A link (see ``links``) that accumulates gradients, and updates the weights inside an If when an update is due.

    The optimizer gets the weighted mean of the gradients since the last update, or their sum if the loss is a sum.

    Args:
        written: the loss, whose divisor is the weight of a batch; if it has none, the weight is the input
            ``batch_weight``.
        reports_norm: whether to output the norm of the mean gradient.

    Attributes:
        due: a boolean scalar, whether this step updates the weights; None until the update is written.
    """

    def __init__(self, state: StepState, written: Written, reports_norm: bool) -> None:
        self._state, self._written, self._reports_norm = state, written, reports_norm
        self.due: Var | None = None

    def around(self, update: Update) -> Update:
        def accumulated(weights: Weights, gradients: Vars) -> list[Var]:
            state, op = self._state, self._state.op
            due = self.due = state.fed(UPDATE) > 0.5
            weight = None
            if not self._written.adds_up:
                weight = self._written.weight() if self._written.weight else state.fed(BATCH_WEIGHT)
            total = None if weight is None else self._added("accumulated_weight", ir.DataType.FLOAT, (), weight, due)
            if total is not None:
                total = op.Where(op.Equal(total, 0.0), 1.0, total)  # if all weights are 0, so are all sums
            sums = []
            for p, start, g in zip(weights.params, weights.start, gradients, strict=True):
                wide = ir.DataType.FLOAT if p.dtype == ir.DataType.FLOAT16 else g.dtype
                term = op.cast(g, wide) if weight is None else op.cast(g, wide) * op.cast(weight, wide)
                sums.append(self._added(f"{p.name}.accumulated", wide, start.shape or (), term, due))
            if self._reports_norm:
                norm = global_norm(op, sums)
                state.report("grad_norm", norm if total is None else norm / total)
            first = len(state.slots)

            def move() -> list[Var]:
                mean = [s if total is None else s / op.cast(total, s.dtype) for s in sums]
                slopes = [op.cast(s, g.dtype) for s, g in zip(mean, gradients, strict=True)]
                return [*update(weights, slopes), *(slot.new for slot in state.slots[first:])]

            then = op.graph([], move, "update")
            old = [*weights.params, *(slot.value for slot in state.slots[first:])]
            otherwise = op.graph([], lambda: [op.wrap(value) for value in old], "keep")
            results = all_of(op.If(due, then_branch=then, else_branch=otherwise, outputs=len(old)))
            for result, value in zip(results, old, strict=True):
                result.value.type, result.value.shape = value.type, value.shape
            count = len(weights.params)
            rows = zip(state.slots[first:], results[count:], strict=True)
            state.slots[first:] = [slot._replace(new=new) for slot, new in rows]
            return results[:count]

        return accumulated

    def _added(self, name: str, dtype: ir.DataType, shape: Sequence[Any], term: Var, due: Var) -> Var:
        """Add ``term`` to a state tensor that is reset after each update; return the sum."""
        start = self._state.start
        before = self._state.new(name, dtype, shape)
        total = before + term
        begin = start.full(start.const(np.array(shape, np.int64)), 0, dtype)
        self._state.slots.append(Slot(before.value, self._state.op.Where(due, 0.0, total), begin))
        return total

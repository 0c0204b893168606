"""Dynamic loss scaling in the graph, as ``torch.amp.GradScaler`` does it between ``backward`` and ``step``.

The cotangent of the loss is the scale, a state tensor. Gradients are divided by it in float32 and checked. If a
gradient is NaN or infinite, the whole update is discarded, including optimizer state, and the scale is reduced; after
``growth_interval`` successful updates in a row, it is increased.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.building.links import Link, Update, Weights
from gradgraph.building.step_state import Slot, StepState
from gradgraph.graph.builder import Var
from gradgraph.optim.transform import Vars
from gradgraph.passes.autocast import Precision
from gradgraph.step.manifest import LOSS_SCALE, SKIPPED_STEPS, column


class LossScale(Link):
    """A link (see ``links``) that scales the loss of a step; ``settings`` has the initial scale and its adjustment."""

    def __init__(self, state: StepState, settings: Precision) -> None:
        self._state, self._settings = state, settings
        self._scale = state.new(LOSS_SCALE, ir.DataType.FLOAT, ())
        self._good = state.new(f"{LOSS_SCALE}_good_steps", ir.DataType.INT64, ())
        self._skipped = state.new(SKIPPED_STEPS, ir.DataType.INT64, ())
        for name, var in ((LOSS_SCALE, self._scale), (SKIPPED_STEPS, self._skipped)):
            state.scale_names[column(state.name, name)] = var.value.name or ""

    def seed(self, loss: Var) -> Var:
        """Return the cotangent of the loss, which is the loss scale."""
        op = self._state.op
        scale = op.cast(self._scale, loss.dtype)
        return scale if loss.shape == () else scale * op.ones_like(loss)

    def gradients(self, gradients: Vars) -> Vars:
        """Return the gradients divided by the scale, in float32 (or float64); exact if the scale is a power of two."""
        op = self._state.op
        factor = 1.0 / self._scale
        wide = [g if g.dtype == ir.DataType.DOUBLE else op.cast(g, ir.DataType.FLOAT) for g in gradients]
        return [g * op.cast(factor, g.dtype) for g in wide]

    def around(self, update: Update) -> Update:
        """Return an update that changes only the scale if a gradient is not finite."""

        def skipping(weights: Weights, gradients: Vars) -> list[Var]:
            state = self._state
            first, finite = len(state.slots), self._are_finite(gradients)
            new = state.where(finite, weights.old, update(weights, gradients), first)
            state.slots += self._advanced(finite)
            state.slots += state.next_step(finite)
            return new

        return skipping

    def _are_finite(self, gradients: Vars) -> Var:
        """Return a boolean scalar: whether the sum of all gradients is finite (no NaN, infinity or overflow)."""
        op = self._state.op
        sums = [op.cast(op.ReduceSum(g, keepdims=0), ir.DataType.FLOAT) for g in gradients]
        total = op.sum_of(sums)
        return ~op.Or(op.IsNaN(total), op.IsInf(total))

    def _advanced(self, finite: Var) -> list[Slot]:
        """Return the new loss scaling slots, after an update that was applied (``finite``) or skipped."""
        op, const, s = self._state.op, self._state.start.const, self._settings
        good = self._good + 1
        due = op.Equal(good, np.int64(s.growth_interval))
        larger = self._scale * s.growth_factor
        grown = op.Where(op.And(due, ~op.IsInf(larger)), larger, self._scale)
        zero = op.const(np.int64(0))
        scale = op.Where(finite, grown, self._scale * s.backoff_factor)
        good = op.Where(op.And(finite, ~due), good, zero)
        skipped = op.Where(finite, self._skipped, self._skipped + 1)
        return [
            Slot(self._scale.value, scale, const(np.float32(s.init_scale))),
            Slot(self._good.value, good, const(np.int64(0)), "counter"),
            Slot(self._skipped.value, skipped, const(np.int64(0)), "counter"),
        ]

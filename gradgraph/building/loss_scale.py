"""Dynamic loss scaling in the graph: what ``torch.amp.GradScaler`` does between ``backward`` and ``step``.

The cotangent of the loss is a factor that is state. Gradients are divided by it in float32 and looked at: where one is
NaN or infinite, the whole update is taken back, weights and all that the optimizer keeps, and the factor shrinks; after
enough updates in a row without one it grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.autocast import Precision
from gradgraph.step.manifest import LOSS_SCALE, SKIPPED_STEPS

NewInput = Callable[[str, ir.DataType, Sequence[int]], Var]
Slot = tuple[ir.Value, Var, Var]  # a state tensor, what it becomes, what it is at the start


class LossScale:
    """The factor of one step, written with ``op``.

    Args:
        op: writes train.onnx.
        start: writes init.onnx.
        settings: how the factor moves.
        new_input: makes a state tensor, of a name, a type and a shape.
    """

    def __init__(self, op: Builder, start: Builder, settings: Precision, new_input: NewInput) -> None:
        self._op, self._start, self._settings = op, start, settings
        self._scale = new_input(LOSS_SCALE, ir.DataType.FLOAT, ())
        self._good = new_input(f"{LOSS_SCALE}_good_steps", ir.DataType.INT64, ())
        self._skipped = new_input(SKIPPED_STEPS, ir.DataType.INT64, ())

    @property
    def names(self) -> dict[str, str]:
        """What its state is called, by what it should be called (the model may have a tensor of that name)."""
        found = {LOSS_SCALE: self._scale, SKIPPED_STEPS: self._skipped}
        return {name: var.value.name or "" for name, var in found.items()}

    def seed(self, loss: Var) -> Var:
        """The cotangent of the loss."""
        scale = self._op.cast(self._scale, loss.dtype)
        return scale if loss.shape == () else scale * self._op.ones_like(loss)

    def unscaled(self, gradients: Sequence[Var]) -> list[Var]:
        """The gradients in float32 (or float64), without the factor: exactly, while it is a power of two."""
        op = self._op
        factor = 1.0 / self._scale
        wide = [g if g.dtype == ir.DataType.DOUBLE else op.cast(g, ir.DataType.FLOAT) for g in gradients]
        return [g * op.cast(factor, g.dtype) for g in wide]

    def are_finite(self, gradients: Sequence[Var]) -> Var:
        """Are all numbers in all of them finite? A sum of numbers is, unless one is not (or the sum overflows)."""
        op = self._op
        sums = [op.cast(op.ReduceSum(g, keepdims=0), ir.DataType.FLOAT) for g in gradients]
        total = op.sum_of(sums)
        return ~op.Or(op.IsNaN(total), op.IsInf(total))

    def advanced(self, finite: Var) -> list[Slot]:
        """The state behind an update that was made, or was not."""
        op, s = self._op, self._settings
        good = self._good + 1
        due = op.Equal(good, np.int64(s.growth_interval))
        larger = self._scale * s.growth_factor
        grown = op.Where(op.And(due, ~op.IsInf(larger)), larger, self._scale)
        zero = op.const(np.int64(0))
        moves = {
            self._scale: (op.Where(finite, grown, self._scale * s.backoff_factor), np.float32(s.init_scale)),
            self._good: (op.Where(op.And(finite, ~due), good, zero), np.int64(0)),
            self._skipped: (op.Where(finite, self._skipped, self._skipped + 1), np.int64(0)),
        }
        return [(state.value, after, self._start.const(begin)) for state, (after, begin) in moves.items()]

"""Transforms that change gradients without a history: decay, clipping, the learning rate."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from gradgraph.arguments import FINITE, checked
from gradgraph.builder import Builder, Var
from gradgraph.optim.schedules import Schedule
from gradgraph.optim.transform import Context, Slots, Transform, Vars, stateless

__all__ = ["add_decayed_weights", "clip_by_global_norm", "clip_by_value", "scale_by_learning_rate"]


@checked(weight_decay=FINITE)
def add_decayed_weights(weight_decay: float) -> Transform:
    """``g ← g + weight_decay·p``."""
    added = stateless("add_decayed_weights", lambda op, g, p: g + weight_decay * p, weight_decay=weight_decay)
    return replace(added, decay=weight_decay)


@checked(limit=FINITE)
def clip_by_value(limit: float) -> Transform:
    """``g ← min(max(g, −limit), limit)``, as ``torch.nn.utils.clip_grad_value_``."""
    return stateless("clip_by_value", lambda op, g, p: op.Clip(g, -limit, limit), limit=limit)


@checked(max_norm=FINITE)
def clip_by_global_norm(max_norm: float) -> Transform:
    """``g ← g · min(1, max_norm / (‖all g‖₂ + 1e-6))``, as ``torch.nn.utils.clip_grad_norm_``."""

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        # float16 ends at 65,504: with a norm of 256 the sum of squares would be infinite, and nothing would move
        wide = [op.cast(g, ir.DataType.FLOAT) if g.dtype == ir.DataType.FLOAT16 else g for g in grads]
        squares = [op.cast(op.ReduceSumSquare(g, keepdims=0), ir.DataType.FLOAT) for g in wide]
        norm = op.Sqrt(op.sum_of(squares))
        factor = op.Min(max_norm / (norm + 1e-6), 1.0)
        return [g * op.cast(factor, g.dtype) for g in grads], {}

    return Transform("clip_by_global_norm", update, arguments={"max_norm": max_norm})


Rate = float | Schedule


def learning_rate(op: Builder, context: Context, lr: Rate) -> Var:
    """The rate of this step, a float32 scalar: a number becomes the input ``learning_rate``, a schedule nodes."""
    if isinstance(lr, Schedule):
        return lr.emit(op, op.cast(context.step(), ir.DataType.FLOAT))
    return context.hyperparameter("learning_rate", lr)


def scale_by_learning_rate(lr: Rate) -> Transform:
    """``g ← −lr·g``; a number becomes the input ``learning_rate``, a schedule part of the graph."""

    def factor(op: Builder, context: Context) -> Var:
        return -learning_rate(op, context, lr)

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        minus = factor(op, context)
        return [g * op.cast(minus, g.dtype) for g in grads], {}

    shown = lr.describe() if isinstance(lr, Schedule) else lr
    return Transform("scale_by_learning_rate", update, arguments={"lr": shown}, factor=factor)

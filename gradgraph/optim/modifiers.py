"""Gradient transforms without state: weight decay, clipping, the learning rate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import FINITE, checked
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.weight_layouts import layout_of
from gradgraph.optim.schedules import Schedule
from gradgraph.optim.transform import Context, Slots, Transform, Vars, stateless
from gradgraph.step.manifest import LEARNING_RATE

__all__ = ["add_decayed_weights", "clip_by_global_norm", "clip_by_unit_norm", "clip_by_value", "scale_by_learning_rate"]


@checked(weight_decay=FINITE)
def add_decayed_weights(weight_decay: float) -> Transform:
    """Return a transform that adds weight decay: ``g ← g + weight_decay·p``."""
    added = stateless("add_decayed_weights", lambda op, g, p: g + weight_decay * p, weight_decay=weight_decay)
    return replace(added, decay=weight_decay)


@checked(limit=FINITE)
def clip_by_value(limit: float) -> Transform:
    """Return a transform that clips each element: ``g ← min(max(g, −limit), limit)`` (``clip_grad_value_``)."""
    return stateless("clip_by_value", lambda op, g, p: op.Clip(g, -limit, limit), limit=limit)


@checked(max_norm=FINITE)
def clip_by_global_norm(max_norm: float) -> Transform:
    """Return a transform that clips the norm of all gradients to ``max_norm``, as ``torch.nn.utils.clip_grad_norm_``.

    ``g ← g · min(1, max_norm / (‖all g‖₂ + 1e-6))``
    """

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        factor = op.Min(max_norm / (global_norm(op, grads) + 1e-6), 1.0)
        return [g * op.cast(factor, g.dtype) for g in grads], {}

    return Transform("clip_by_global_norm", update, arguments={"max_norm": max_norm})


def global_norm(op: Builder, grads: Vars) -> Var:
    """Return the 2-norm of all gradients as one vector, ``√(Σ g²)`` over all elements: a float32 scalar."""
    # the sum of squares overflows float16 at 65,504, a norm of 256: the update would become zero
    wide = [op.cast(g, ir.DataType.FLOAT) if g.dtype == ir.DataType.FLOAT16 else g for g in grads]
    squares = [op.cast(op.ReduceSumSquare(g, keepdims=0), ir.DataType.FLOAT) for g in wide]
    return op.Sqrt(op.sum_of(squares))


@checked(clipping=FINITE, eps=FINITE)
def clip_by_unit_norm(clipping: float = 0.01, eps: float = 1e-3) -> Transform:
    """Return a transform for adaptive gradient clipping, per output unit: ``g ← g · min(1, clipping·max(‖p‖, ε)/‖g‖)``.

    A vector is one unit. Otherwise the layer that reads the weight determines the axes of its units
    (``graph.weight_layouts``); by default it is the first axis. See Brock et al., arXiv 2102.06171.
    """

    def clipped(op: Builder, g: Var, p: Var) -> Var:
        axes = layout_of(p.value).summed(p.rank)
        limit = clipping * op.Max(_norms(op, p, axes), eps)
        return g * op.Min(limit / op.Max(_norms(op, g, axes), 1e-6), 1.0)

    def each(op: Builder, g: Var, p: Var) -> Var:
        if g.dtype != ir.DataType.FLOAT16:
            return clipped(op, g, p)
        return op.cast(clipped(op, *(op.cast(x, ir.DataType.FLOAT) for x in (g, p))), g.dtype)

    return stateless("clip_by_unit_norm", each, clipping=clipping, eps=eps)


def _norms(op: Builder, x: Var, axes: list[int]) -> Var:
    if not axes:
        return op.Abs(x)
    return op.Sqrt(op.ReduceSumSquare(x, op.const(np.array(axes, np.int64)), keepdims=1))


Rate = float | Schedule


def learning_rate(op: Builder, context: Context, lr: Rate) -> Var:
    """Return the learning rate of this step, a float32 scalar.

    A number becomes the input ``learning_rate``; a schedule becomes nodes of the graph.
    """
    if not isinstance(lr, Schedule):
        return context.hyperparameter(LEARNING_RATE, lr)
    if lr.multiple is not None:
        base, factor = lr.multiple
        return learning_rate(op, context, base) * factor
    return context.scheduled(lr)


def scale_by_learning_rate(lr: Rate) -> Transform:
    """Return a transform that multiplies by ``−lr``: a number becomes the input ``learning_rate``, a schedule nodes."""

    def factor(op: Builder, context: Context) -> Var:
        return -learning_rate(op, context, lr)

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        minus = factor(op, context)
        return [g * op.cast(minus, g.dtype) for g in grads], {}

    shown = lr.describe() if isinstance(lr, Schedule) else lr
    return Transform("scale_by_learning_rate", update, arguments={"lr": shown}, factor=factor)

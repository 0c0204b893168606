"""L-BFGS: search directions from the last few steps and gradient changes, for full batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError
from gradgraph.graph.builder import Builder, Var
from gradgraph.optim.modifiers import Rate, learning_rate
from gradgraph.optim.recipe_parts import check_range, checked_recipe, made, not_negative
from gradgraph.optim.transform import Context, Optimizer, Slots, Transform, Vars
from gradgraph.optim.weight_groups import Grouping

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["lbfgs"]

CURVED = 1e-10  # steps with sᵀy up to this are not stored, as in PyTorch


def _quasi_newton_steps(lr: Rate, m: int, tolerance_grad: float, tolerance_change: float) -> Transform:
    """Return the transform of L-BFGS.

    The direction is a linear combination of the last m steps ``s``, the last m gradient changes ``y``, and ``g``. So
    the two loops of L-BFGS run over 2m + 1 coefficients, and need only the dot products of these vectors.
    """

    def init(op: Builder, params: Vars) -> Slots:
        def past(p: Var) -> Var:
            return op.full(op.const(np.array([m, *(p.shape or ())], np.int64)), 0, p.dtype)

        return {
            "prev_grad": [op.zeros_like(p) for p in params],
            "prev_step": [op.zeros_like(p) for p in params],
            "steps": [past(p) for p in params],
            "changes": [past(p) for p in params],
        }

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        check_range("lbfgs", grads)
        changes = [g - old for g, old in zip(grads, slots["prev_grad"], strict=True)]
        curvature = _total(
            op, [op.ReduceSum(y * s, keepdims=0) for y, s in zip(changes, slots["prev_step"], strict=True)]
        )
        square = _total(op, [op.ReduceSumSquare(y, keepdims=0) for y in changes])
        curved = curvature > CURVED
        scale = curvature / op.Where(curved, square, 1.0)
        narrow = op.cast(scale, ir.DataType.FLOAT)
        before = context.scalar("inverse_curvature", 1.0, lambda old: op.Where(curved, narrow, old))
        scale = op.Where(curved, scale, op.cast(before, ir.DataType.DOUBLE))
        new = {
            "prev_grad": grads,
            "steps": [_pushed(op, past, s, curved) for past, s in zip(slots["steps"], slots["prev_step"], strict=True)],
            "changes": [_pushed(op, past, y, curved) for past, y in zip(slots["changes"], changes, strict=True)],
        }
        bases = [_basis(op, *row) for row in zip(new["steps"], new["changes"], grads, strict=True)]
        dots = _total(op, [op.MatMul(b, op.Transpose(b, perm=[1, 0])) for b in bases])
        coefficients = _two_loops(op, dots, scale, m)
        slope = op.ReduceSum(_row(op, dots, 2 * m) * coefficients, keepdims=0)
        largest = op.Max(*(op.ReduceMax(op.Abs(g), keepdims=0) for g in grads)) if len(grads) > 1 else op.ReduceMax(
            op.Abs(grads[0]), keepdims=0)  # fmt: skip
        length = _total(op, [op.ReduceSum(op.Abs(g), keepdims=0) for g in grads])
        rate = op.cast(learning_rate(op, context, lr), ir.DataType.DOUBLE)
        first = op.Equal(context.step(), np.int64(0))
        rate = op.Where(first, op.Min(1.0 / length, 1.0), op.const(np.float64(1.0))) * rate
        weights = op.Unsqueeze(coefficients * rate, np.array([0], np.int64))
        moves = [
            op.Reshape(op.cast(weights, b.dtype) @ b, op.const(np.array(p.shape or (), np.int64)))
            for b, p in zip(bases, params, strict=True)
        ]
        goes = (slope <= -tolerance_change) & (largest > tolerance_grad)
        return [op.Where(goes, d, 0.0) for d in moves], {**new, "prev_step": moves}

    arguments = {"history_size": m, "tolerance_grad": tolerance_grad, "tolerance_change": tolerance_change}
    return Transform("quasi_newton_steps", update, init, arguments)


def _total(op: Builder, parts: Sequence[Var]) -> Var:
    """Return the sum of ``parts``, one per weight, in float64."""
    return op.sum_of([op.cast(part, ir.DataType.DOUBLE) for part in parts])


def _pushed(op: Builder, past: Var, latest: Var, curved: Var) -> Var:
    """Return ``past`` without its first, oldest row and with ``latest`` as last; ``past`` if ``curved`` is false."""
    ends = (np.array([i], np.int64) for i in (1, np.iinfo(np.int64).max, 0))
    younger = op.Concat(op.Slice(past, *ends), op.Unsqueeze(latest, np.array([0], np.int64)), axis=0)
    return op.Where(curved, younger, past)


def _basis(op: Builder, steps: Var, changes: Var, g: Var) -> Var:
    """Return a matrix of 2m + 1 rows: the last m steps, the last m gradient changes, and the gradient ``g``."""
    m = (steps.shape or (0,))[0]
    rows = [op.Reshape(x, np.array([n, -1], np.int64)) for x, n in ((steps, m), (changes, m), (g, 1))]
    return op.Concat(*rows, axis=0)


def _row(op: Builder, dots: Var, i: int) -> Var:
    return op.Gather(dots, op.const(np.int64(i)), axis=0)


def _two_loops(op: Builder, dots: Var, scale: Var, m: int) -> Var:
    """Return the 2m + 1 coefficients of the direction by the two loops of L-BFGS.

    ``dots`` [2m + 1, 2m + 1] are the dot products of the rows of ``_basis``, and ``scale`` the initial inverse
    curvature.
    """

    def unit(i: int) -> Var:
        return op.const(np.eye(2 * m + 1)[i])

    direction = -unit(2 * m)
    shares, inverses = {}, {}
    for i in reversed(range(m)):
        product = op.Gather(_row(op, dots, i), op.const(np.int64(m + i)), axis=0)
        known = product > 0.0
        inverses[i] = op.Where(known, 1.0 / op.Where(known, product, 1.0), 0.0)
        shares[i] = inverses[i] * op.ReduceSum(_row(op, dots, i) * direction, keepdims=0)
        direction = direction - shares[i] * unit(m + i)
    direction = direction * scale
    for i in range(m):
        back = inverses[i] * op.ReduceSum(_row(op, dots, m + i) * direction, keepdims=0)
        direction = direction + (shares[i] - back) * unit(i)
    return direction


@checked_recipe()
def lbfgs(
    lr: Rate = 1.0,
    history_size: int = 10,
    tolerance_grad: float = 1e-7,
    tolerance_change: float = 1e-9,
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """L-BFGS for full batches, as ``torch.optim.LBFGS(max_iter=1)`` without line search, with a shorter history."""
    not_negative(lr=lr, tolerance_grad=tolerance_grad, tolerance_change=tolerance_change)
    if not 1 <= history_size <= 1000:
        raise BuildError(f"history_size must be between 1 and 1000, but is {history_size}")
    steps = _quasi_newton_steps(lr, int(history_size), tolerance_grad, tolerance_change)
    return made(lr, [steps], scaled=False)

"""Adafactor: Adam with the second moments of a matrix factored into row and column means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import NUMBER, Kind
from gradgraph.errors import BuildError
from gradgraph.graph.builder import Builder, Var
from gradgraph.optim.modifiers import Rate, learning_rate
from gradgraph.optim.recipe_parts import check_range, checked_recipe, made, not_negative
from gradgraph.optim.transform import Context, Optimizer, Slots, Transform, Vars, parameterwise
from gradgraph.optim.trust import norm
from gradgraph.optim.weight_groups import Grouping

FLOORS = Kind(
    "a number or None, and a number, such as (None, 1e-3)",
    lambda v: isinstance(v, tuple | list) and len(v) == 2 and NUMBER.or_none().fits(v[0]) and NUMBER.fits(v[1]),
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["adafactor"]


def _factored_steps(
    lr: Rate, beta2_decay: float, eps: tuple[float | None, float], d: float, weight_decay: float
) -> Transform:
    """Return a transform for Adafactor's update ``−max(ε₂, rms p)·min(lr, 1/√t)·u / max(1, rms u / d) − lr·λ·p``.

    ``u = g/√max(v, ε₁²)`` is the gradient divided by the root of its second moments v. For a vector, v is a moving
    average of g² with weight ``τ = t^beta2_decay`` for the new value. For a matrix, ``v = r·c / mean r``, where r and c
    are such averages of the means of g² along rows and along columns. ``rms`` is the root mean square, λ the weight
    decay.
    """

    def init(op: Builder, params: Vars) -> Slots:
        def shaped(p: Var, drop: int) -> Var:
            sizes = [1 if axis == (p.rank + drop) else d for axis, d in enumerate(p.shape or ())]
            return op.full(op.const(np.array(sizes, np.int64)), 0.0, p.dtype)

        return {
            "row_var": [shaped(p, -1) if p.rank > 1 else None for p in params],
            "col_var": [shaped(p, -2) if p.rank > 1 else None for p in params],
            "variance": [None if p.rank > 1 else op.zeros_like(p) for p in params],
        }

    def numbers(op: Builder, context: Context) -> list[Var]:
        t = op.cast(context.step() + 1, ir.DataType.FLOAT)
        rate = learning_rate(op, context, lr)
        return [op.Pow(t, beta2_decay), op.Min(rate, 1.0 / op.Sqrt(t)), rate * weight_decay]

    def each(
        op: Builder, g: Var, p: Var, slots: Mapping[str, Var], take: Var, rate: Var, decay: Var
    ) -> tuple[Var, Mapping[str, Var]]:
        check_range("adafactor", [g])
        floor = float(np.finfo(g.dtype.numpy()).eps) if eps[0] is None else eps[0]
        size = math.sqrt(max(math.prod(n for n in p.shape or () if isinstance(n, int)), 1))
        new = _variances(op, g * g, slots, take)
        v = new["variance"] if "variance" in new else _product(op, new["row_var"], new["col_var"], floor)
        u = g / op.Sqrt(op.Max(v, floor * floor))
        scale = op.Max(norm(op, p) / size, eps[1]) * rate / op.Max(norm(op, u) / (size * d), 1.0)
        return -(u * scale + p * decay if weight_decay else u * scale), new

    arguments = {"beta2_decay": beta2_decay, "eps": list(eps), "d": d, "weight_decay": weight_decay}
    return parameterwise("factored_steps", arguments, each, init, numbers)


def _variances(op: Builder, square: Var, slots: Mapping[str, Var], take: Var) -> dict[str, Var]:
    """Return the updated slots: moving averages of g² or, for a matrix, of its means along rows and columns."""

    def mean(slot: str) -> Var:
        axis = {"row_var": -1, "col_var": -2}.get(slot)
        return square if axis is None else op.ReduceMean(square, op.const(np.array([axis], np.int64)), keepdims=1)

    return {slot: old + take * (mean(slot) - old) for slot, old in slots.items()}


def _product(op: Builder, rows: Var, columns: Var, floor: float) -> Var:
    """Return the second moments of a matrix from their means along rows and columns."""
    mean = op.ReduceMean(rows, op.const(np.array([-2], np.int64)), keepdims=1)
    return rows * columns / op.Max(mean, floor)


@checked_recipe(eps=FLOORS)
def adafactor(
    lr: Rate = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """Adam with factored second moments (one row and one column per matrix), as ``torch.optim.Adafactor``."""
    not_negative(lr=lr, weight_decay=weight_decay, **{f"eps[{i}]": e for i, e in enumerate(eps) if e is not None})
    if beta2_decay > 0.0 or d < 1.0:
        raise BuildError(f"beta2_decay must be at most 0 and d at least 1, but they are {beta2_decay} and {d}")
    return made(lr, [_factored_steps(lr, beta2_decay, eps, d, weight_decay)], scaled=False)

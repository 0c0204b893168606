"""Muon: momentum whose matrices are orthogonalised by a few matrix products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import onnx_ir as ir

from gradgraph.arguments import NUMBER, Kind
from gradgraph.errors import BuildError, shown
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import known_sizes
from gradgraph.graph.weight_layouts import layout_of
from gradgraph.optim.modifiers import Rate
from gradgraph.optim.recipe_parts import below_one, checked_recipe, decay_links, made, not_negative
from gradgraph.optim.transform import Optimizer, Transform, parameterwise, zeros
from gradgraph.optim.trust import norm
from gradgraph.optim.weight_groups import Grouping

TRIPLE = Kind("three numbers", lambda v: isinstance(v, tuple | list) and len(v) == 3 and all(map(NUMBER.fits, v)))
Triple = tuple[float, float, float]
ADJUSTMENTS = {
    "original": lambda outputs, inputs: math.sqrt(max(1.0, outputs / inputs)),
    "match_rms_adamw": lambda outputs, inputs: 0.2 * math.sqrt(max(outputs, inputs)),
}

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["muon"]


def _orthogonal(op: Builder, x: Var, coefficients: Triple, steps: int, eps: float) -> Var:
    """Return approximately the orthonormal matrix nearest to x, by iterations ``X ← aX + (bA + cA²)X``, ``A = XXᵀ``.

    a, b and c are the ``coefficients``. The result has nearly orthonormal rows, or columns if x is tall.
    """
    a, b, c = coefficients
    rows, columns = x.shape or (0, 0)
    is_tall = int(rows or 0) > int(columns or 0)
    x = op.Transpose(x, perm=[1, 0]) if is_tall else x
    x = x / op.Max(norm(op, x), eps)
    for _ in range(steps):
        gram = x @ op.Transpose(x, perm=[1, 0])
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return op.Transpose(x, perm=[1, 0]) if is_tall else x


def _orthogonal_momentum(
    momentum: float, nesterov: bool, coefficients: Triple, eps: float, steps: int, adjustment: str
) -> Transform:
    """Return a transform that computes Muon's direction: the orthonormal matrix nearest to ``m``, scaled.

    The momentum is ``m ← m + (1−μ)(g − m)``, μ the argument ``momentum``. With ``nesterov``, ``g + μ(m − g)`` replaces
    ``m``. The scale depends on the shape of the matrix (``adjustment``).
    """

    def each(op: Builder, g: Var, p: Var, slots: Mapping[str, Var]) -> tuple[Var, Mapping[str, Var]]:
        _check_is_matrix(p)
        m = slots["momentum_buffer"] + (1.0 - momentum) * (g - slots["momentum_buffer"])
        ahead = g + momentum * (m - g) if nesterov else m
        wide = op.cast(ahead, ir.DataType.FLOAT) if ahead.dtype == ir.DataType.FLOAT16 else ahead
        factor = ADJUSTMENTS[adjustment](*layout_of(p.value).matrix(known_sizes(p.shape)))
        step = _orthogonal(op, wide, coefficients, steps, eps)
        return op.cast(step * factor if factor != 1.0 else step, g.dtype), {"momentum_buffer": m}

    arguments = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": list(coefficients), "eps": eps,
                 "ns_steps": steps, "adjust_lr_fn": adjustment}  # fmt: skip
    return parameterwise("orthogonal_momentum", arguments, each, zeros("momentum_buffer"))


def _check_is_matrix(p: Var) -> None:
    if p.rank != 2:
        name = shown(p.value.name)
        raise BuildError(
            f"muon trains matrices only, but the weight '{name}' has shape {list(p.shape or ())}",
            remedy=f"give it another optimizer, as in groups={{'{name}': gradgraph.optim.adamw(1e-3)}}, or freeze it",
            shell=f"freeze it with --freeze '{name}', or use --optimizer adamw",
        )


@checked_recipe(ns_coefficients=TRIPLE)
def muon(
    lr: Rate = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: Triple = (3.4445, -4.775, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str = "original",
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """Orthogonalised updates for matrices, with decoupled decay, as ``torch.optim.Muon`` (which uses bfloat16)."""
    not_negative(lr=lr, weight_decay=weight_decay, eps=eps)
    below_one(momentum=momentum)
    if adjust_lr_fn not in ADJUSTMENTS:
        raise BuildError(f"adjust_lr_fn must be one of {', '.join(ADJUSTMENTS)}, not '{shown(adjust_lr_fn)}'")
    if not 0 < ns_steps < 100:
        raise BuildError(f"ns_steps must be between 1 and 99, but is {ns_steps}")
    steps = _orthogonal_momentum(momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn)
    return made(lr, [steps, *decay_links(weight_decay)])

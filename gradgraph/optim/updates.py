"""Optimizer updates of one parameter, as named operators.

Each returns the new parameter, ``keep·p + rate·direction``, and its new state. The factors are scalars: ``rate`` is
negative, and ``keep`` is optional and below 1 with weight decay.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.named_operators import named_operator
from gradgraph.rules.registry import case, positive, real, uniform

_TAKES = [0.1, 0.001]
_FACTORS = (uniform(-0.2, -0.1), positive())


@named_operator(
    "AdamUpdate",
    case(real(2, 3), real(2, 3), real(2, 3), positive(2, 3), *_FACTORS, takes=_TAKES),
    case(real(2, 3), real(2, 3), real(2, 3), positive(2, 3), *_FACTORS, uniform(0.9, 1.0), takes=_TAKES),
    case(real(), real(), real(), positive(), *_FACTORS, takes=_TAKES),
    case(real(0, 3), real(0, 3), real(0, 3), positive(0, 3), *_FACTORS, takes=_TAKES),
    like=(0, 2, 3),
)
def adam_update(
    op: Builder,
    p: Var,
    g: Var,
    m: Var,
    v: Var,
    rate: Var,
    floor: Var,
    keep: Var | None = None,
    *,
    takes: Sequence[float],
) -> tuple[Var, Var, Var]:
    """Return the new p, m and v: ``p ← keep·p + rate·m / (√v + floor)`` with the new ``moments``; floor is scalar."""
    m, v = moments(g, m, v, takes)
    return kept(p, keep) + m / (op.Sqrt(v) + floor) * rate, m, v


def moments(g: Var, m: Var, v: Var, takes: Sequence[float]) -> tuple[Var, Var]:
    """Return ``m + (1−β₁)(g − m)`` and ``v + (1−β₂)(g² − v)``; ``takes`` are 1−β₁ and 1−β₂.

    In the equal form β₁m + (1−β₁)g, β₁m would be ready before g: onnxruntime opens a session in time quadratic in the
    number of ready nodes.
    """
    return m + takes[0] * (g - m), v + takes[1] * (g * g - v)


@named_operator(
    "MomentumUpdate",
    case(real(2, 3), real(2, 3), real(2, 3), uniform(-0.2, -0.1), decay=0.9, nesterov=0),
    case(real(2, 3), real(2, 3), real(2, 3), uniform(-0.2, -0.1), uniform(0.9, 1.0), decay=0.9, nesterov=1),
    like=(0, 2),
)
def momentum_update(
    op: Builder, p: Var, g: Var, m: Var, rate: Var, keep: Var | None = None, *, decay: float, nesterov: int
) -> tuple[Var, Var]:
    """Return ``keep·p + rate·d`` and ``m ← decay·m + g``; d is m, or ``g + decay·m`` with ``nesterov``."""
    m = decay * m + g
    return kept(p, keep) + (g + decay * m if nesterov else m) * rate, m


def kept(p: Var, keep: Var | None) -> Var:
    return p if keep is None else p * keep

"""Projected gradient steps in one graph: repeat x ← project(update(x, gradient)), within a box and a ball."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import Kind
from gradgraph.autodiff.calls import Net, Points, looped
from gradgraph.autodiff.site_values import baselines_of
from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.randomness import FLOAT, RandomSource

NORMS = ("linf", "l2")
Vars = Sequence[Var]


def _is_box(bounds: Any) -> bool:
    """Whether ``bounds`` are None or a pair; of numbers or arrays of one shape, none may be above its partner."""
    if bounds is None or not isinstance(bounds, Sequence) or isinstance(bounds, str) or len(bounds) != 2:
        return bounds is None
    if any(b is None or isinstance(b, str | Mapping) for b in bounds):
        return True
    try:
        return bool(np.all(np.asarray(bounds[0]) <= np.asarray(bounds[1])))
    except (TypeError, ValueError):  # no numbers, or other shapes: reported where they are read
        return True


BOUNDS = Kind("a pair of a lowest and a highest value in this order, each a number, an array or None", _is_box)


@dataclass
class Rule:
    """An update x ← f(x, gradient, state). This one has no state."""

    function: Callable[[Builder, Var, Var], Var]

    def begin(self, op: Builder, params: Vars) -> list[Var]:
        """Return the initial state, for parameters that start at ``params``."""
        return []

    def step(
        self, op: Builder, params: Vars, gradients: Vars, state: Sequence[Var], index: Var
    ) -> tuple[list[Var], list[Var]]:
        """Return the new parameters and the new state; ``index`` is the number of the iteration."""
        return [op.like(self.function(op, p, g), p) for p, g in zip(params, gradients, strict=True)], []


def iterated(
    net: Net,
    n: int,
    gradients: Callable[[Points], tuple[Points, Sequence[Var]]],
    update: Rule,
    start: Points,
    project: Callable[[Points], Points],
    unroll: bool,
) -> tuple[Points, list[Var]]:
    """Apply ``update`` and ``project`` ``n`` times; return the last points, and the other results, stacked."""
    op, count = net.op, len(net.sites)
    begin = list(start.values())
    slots = update.begin(op, begin)

    def body(rows: list[Var], states: list[Var]) -> tuple[list[Var], Sequence[Var]]:
        points = dict(zip(net.sites, states[:count], strict=True))
        slopes, more = gradients(points)
        moved, new = update.step(op, states[:count], [slopes[x] for x in net.sites], states[count:], rows[0])
        return [*project(dict(zip(net.sites, moved, strict=True))).values(), *new], more

    states, stacks = looped(op, [np.arange(n)], [*begin, *slots], body, unroll)
    return dict(zip(net.sites, states[:count], strict=True)), stacks


@dataclass(frozen=True)
class Ball:
    """A ball around the start, in the norm ``linf`` or ``l2``, for each row or for the whole tensor."""

    norm: str
    radius: float
    per_sample: bool

    def project(self, op: Builder, x: Var, centre: Var) -> Var:
        """Return the point of the ball that is next to ``x``."""
        change = op.like(x - centre, centre)
        if self.norm == "linf":
            return centre + op.Clip(change, -self.radius, self.radius)
        length = self.length(op, change, centre)
        return centre + change * op.Min(self.radius / op.Where(length > 0.0, length, 1.0), 1.0)

    def draw(self, op: Builder, source: RandomSource, centre: Var) -> Var:
        """Return a random change, uniform in the ball."""
        if self.norm == "linf":
            return op.cast(source.uniform(op, op.shape(centre)) * (2 * self.radius) - self.radius, centre.dtype)
        raw = op.like(op.cast(source.normal(op, op.shape(centre)), centre.dtype), centre)
        length = self.length(op, raw, centre)
        size = op.cast(op.ReduceProd(op.Shape(centre, start=self._first_axis(centre)), keepdims=0), FLOAT)
        part = op.Pow(source.uniform(op, op.shape(length)), op.Reciprocal(size)) * self.radius
        return raw * op.cast(part, centre.dtype) / length

    def _first_axis(self, centre: Var) -> int:
        return int(self.per_sample and not centre.value.is_initializer())

    def length(self, op: Builder, change: Var, centre: Var) -> Var:
        """Return the L2 norm, with axes of length 1 where it sums."""
        axes = np.arange(self._first_axis(centre), centre.rank)
        return op.ReduceL2(change, axes, keepdims=1) if len(axes) else op.Abs(change)


def projection(net: Net, bounds: tuple[Any, Any] | None, ball: Ball | None) -> Callable[[Points], Points]:
    """Return the projection of points onto the ball around the start, then onto the box of the bounds."""
    op, names = net.op, {x: x.name or "" for x in net.sites}
    low, high = (None, None) if bounds is None else bounds
    lowest = None if low is None else baselines_of(net, low, names, "lower bound")
    highest = None if high is None else baselines_of(net, high, names, "upper bound")
    centre = net.here()

    def project(points: Points) -> dict[ir.Value, Var]:
        found = {}
        for x, y in points.items():
            y = y if ball is None else ball.project(op, y, centre[x])
            y = y if lowest is None else op.Max(y, lowest[x])
            found[x] = op.like(y if highest is None else op.Min(y, highest[x]), centre[x])
        return found

    return project

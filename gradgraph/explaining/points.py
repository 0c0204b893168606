"""Points at which a model is evaluated, along a line or around its input, and reductions over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.autodiff.calls import Net, Points, looped, merged, split
from gradgraph.errors import BuildError, counted
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import as_dims, record_shape
from gradgraph.passes.randomness import DOUBLE, RandomSource, initial_state

RULES = ("gausslegendre", "riemann_left", "riemann_middle", "riemann_right", "riemann_trapezoid")  # captum's names


def quadrature(rule: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``n`` positions in [0, 1] and their weights, which sum to 1."""
    if rule == "gausslegendre":
        at, weights = np.polynomial.legendre.leggauss(n)
        return (at + 1) / 2, weights / 2
    if rule == "riemann_trapezoid":
        ends = np.ones(n)
        ends[[0, -1]] = 0.5 if n > 1 else 1.0
        return np.linspace(0, 1, n), ends / max(n - 1, 1)
    shift = {"riemann_left": 0.0, "riemann_middle": 0.5, "riemann_right": 1.0}[rule]
    return (np.arange(n) + shift) / n, np.full(n, 1 / n)


class Places:
    """The points of an average.

    Args:
        net: the model.
        row: a number for each point, from which ``_points`` computes it: a position, or the number of a draw.
        seed: the seed of random points.
    """

    def __init__(self, net: Net, row: np.ndarray, seed: int = 0) -> None:
        self.net, self.row, self.source = net, row, RandomSource(net.op.const(initial_state(seed)))

    def at(self, row: Var, count: int) -> Points:
        """Return the points for ``count`` numbers, [count], as rows of the batch."""
        self.source.places = 0  # unrolled or not, a draw depends on its number only
        op = self.net.op
        return {x: merged(op, y, op.wrap(x), count) for x, y in self._points(row, count).items()}

    def _points(self, row: Var, count: int) -> Points:
        """Return the points, [count, *shape of the site]."""
        raise NotImplementedError


class Line(Places):
    """Points on straight lines from ``baselines``, in the shape of the sites, to the sites, at position 1."""

    def __init__(self, net: Net, baselines: Points, positions: np.ndarray) -> None:
        super().__init__(net, positions)
        self._baselines = baselines

    def _points(self, row: Var, count: int) -> Points:
        op, found = self.net.op, {}
        for x, b in self._baselines.items():
            here = op.wrap(x)
            found[x] = b + op.Reshape(op.cast(row, here.dtype), [-1, *[1] * here.rank]) * (here - b)
        return found


class Around(Places):
    """The sites plus normal noise of deviation ``stdevs``, a function of the seed and of the number of the draw."""

    def __init__(self, net: Net, stdevs: Points, seed: int, n: int) -> None:
        super().__init__(net, np.arange(n), seed)
        self._stdevs = stdevs

    def _points(self, row: Var, count: int) -> Points:
        op, found = self.net.op, {}
        for x, stdev in self._stdevs.items():
            here = op.wrap(x)
            shape = op.Concat(op.const([count]), op.shape(here), axis=0)
            found[x] = here + op.cast(self.source.normal(op, shape, [op.Gather(row, 0)]), here.dtype) * stdev
        return found


class Between(Places):
    """Random points between the sites and random rows of background data.

    Attributes:
        differences: the differences of the sites and these rows, for the points of the last call of ``at``.
    """

    def __init__(self, net: Net, background: Points, seed: int, n: int) -> None:
        super().__init__(net, np.arange(n), seed)
        self._background, self.differences = background, dict[ir.Value, Var]()

    def _points(self, row: Var, count: int) -> Points:
        op, found = self.net.op, {}
        samples = op.dim(op.wrap(next(iter(self._background))), 0)
        shape = op.Concat(op.const([count]), samples, axis=0)
        pick, position = (self.source.uniform(op, shape, [op.Gather(row, 0)]) for _ in range(2))
        for x, data in self._background.items():
            here = op.wrap(x)
            rows = op.Floor(pick * op.cast(op.dim(data, 0), pick.dtype))
            b = op.Gather(data, op.Cast(rows, to=int(ir.DataType.INT64)), axis=0)
            gap = here - b
            wide = op.Concat(shape, op.const(np.ones(here.rank - 1, np.int64)), axis=0)
            found[x] = b + op.Reshape(op.cast(position, here.dtype), wide) * gap
            self.differences[x] = merged(op, gap, here, count)
        return found


def reduced(
    net: Net,
    points: Places,
    evaluate: Callable[[Points, int], Sequence[Var]],
    weights: np.ndarray | None,
    zeros: Sequence[Var | None],
    unroll: bool,
) -> list[Var]:
    """Return the weighted sum over all points of each result of ``evaluate``; without ``weights``, stack the results.

    Args:
        evaluate: ``evaluate(points, rows)`` returns the results for ``rows`` times the samples.
        zeros: for each result, zeros of its shape, if its sizes are known; values of others are stacked, then summed.
    """
    op, k, n = net.op, net.chunk, len(points.row)
    rounds = -(-n // k)
    row = np.pad(points.row, (0, rounds * k - n), "edge").reshape(rounds, k)
    scale = np.pad(np.ones(n) if weights is None else weights, (0, rounds * k - n)).reshape(rounds, k)
    kept = [i for i, y in enumerate(zeros) if y is not None and weights is not None]

    def body(rows: list[Var], states: list[Var]) -> tuple[list[Var], list[Var]]:
        found = [split(op, y, k) for y in evaluate(points.at(rows[0], k), k)]
        if weights is None:
            return [], found
        parts = [_weighed(op, y, rows[1]) for y in found]
        sums = [states[j] + parts[i] for j, i in enumerate(kept)]
        return sums, [y for i, y in enumerate(parts) if i not in kept]

    wide = any(x.dtype == DOUBLE for x in net.sites)
    scanned = [a if a.dtype.kind == "i" or wide else a.astype(np.float32) for a in (row, scale)]
    sums, stacks = looped(op, scanned, [y for i in kept if (y := zeros[i]) is not None], body, unroll)
    if weights is None:  # [rounds, k, …]
        return [op.Slice(merged(op, y, op.Gather(y, 0)), [0], [n], [0]) for y in stacks]
    totals = iter(op.ReduceSum(y, [0], keepdims=0) for y in stacks)
    done = dict(zip(kept, sums, strict=True))
    return [done[i] if i in done else next(totals) for i in range(len(zeros))]


def _weighed(op: Builder, y: Var, weights: Var) -> Var:
    """Return the sum of the rows of ``y`` times a vector of weights."""
    return op.ReduceSum(y * op.Reshape(op.cast(weights, y.dtype), [-1, *[1] * (y.rank - 1)]), [0], keepdims=0)


def zeros_of(op: Builder, graph: ir.Graph, y: ir.Value) -> Var | None:
    """Return zeros of the shape of ``y``, if each size is a number or a size of an input; otherwise None."""
    known = {str(d): (x, i) for x in graph.inputs if x.shape is not None for i, d in enumerate(as_dims(x.shape)) if d}
    shape = op.wrap(y).shape
    if shape is None or any(not isinstance(d, int) and d not in known for d in shape):
        return None
    sizes = [
        op.const([d]) if isinstance(d, int) else op.dim(op.wrap(known[d or ""][0]), known[d or ""][1]) for d in shape
    ]
    zeros = op.full(op.Concat(*sizes, axis=0) if sizes else op.const(np.zeros(0, np.int64)), 0, op.wrap(y).dtype)
    record_shape(zeros.value, shape)
    return zeros


def checked_weights(weights: Sequence[float], n: int) -> np.ndarray:
    found = np.asarray(weights, np.float64)
    if found.shape != (n,):
        raise BuildError(
            f"there are {counted(found.size, 'weight')} for {counted(n, 'point')}; pass one for each point"
        )
    return found

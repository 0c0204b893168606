"""Points at which a model is evaluated, along a line or around its input, and reductions over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import described
from gradgraph.errors import BuildError, counted, shown
from gradgraph.explaining.calls import Net, Points, looped, merged, split
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import as_dims, record_shape
from gradgraph.passes.randomness import DOUBLE, RandomSource, initial_state

RULES = ("gausslegendre", "riemann_left", "riemann_middle", "riemann_right", "riemann_trapezoid")  # captum's names
Baseline = Any  # a number, an array, a dict of them by name, or "input"


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


class Places(Protocol):
    """The points of an average.

    Attributes:
        rows: arrays with one row for each point.
    """

    rows: list[np.ndarray]

    def at(self, rows: Sequence[Var], count: int) -> Points:
        """Return the points for ``count`` rows: scalars, or vectors of this length for ``count`` > 1."""
        ...


class Line:
    """Points on straight lines from baselines to the sites.

    Args:
        net: the model.
        baselines: for each site, the value at position 0, in its shape.
        positions: the positions; 1 is the site itself.
    """

    def __init__(self, net: Net, baselines: Points, positions: np.ndarray) -> None:
        self._net, self._baselines, self.rows = net, baselines, [positions]

    def at(self, rows: Sequence[Var], count: int) -> Points:
        op, found = self._net.op, {}
        for x, b in self._baselines.items():
            here = op.wrap(x)
            position = op.cast(rows[0], here.dtype)
            if count > 1:
                position = op.Reshape(position, [-1, *[1] * here.rank])
            y = b + position * (here - b)
            found[x] = merged(op, y, here) if count > 1 else y
        return found


class Around:
    """The sites plus normal noise, which is a function of the seed and of the number of the draw.

    Args:
        net: the model.
        stdevs: for each site, the standard deviation, which broadcasts to it.
        seed: the seed.
        n: the number of draws.
    """

    def __init__(self, net: Net, stdevs: Points, seed: int, n: int) -> None:
        self._net, self._stdevs, self.rows = net, stdevs, [np.arange(n)]
        self._source = RandomSource(net.op.const(initial_state(seed)))

    def at(self, rows: Sequence[Var], count: int) -> Points:
        op, found = self._net.op, {}
        self._source.places = 0  # unrolled or not, a draw depends on its number only
        first = rows[0] if count == 1 else op.Gather(rows[0], 0)
        for x, stdev in self._stdevs.items():
            here = op.wrap(x)
            shape = op.shape(here) if count == 1 else op.Concat(op.const([count]), op.shape(here), axis=0)
            noise = op.cast(self._source.normal(op, shape, [first]), here.dtype)
            found[x] = here + noise * stdev if count == 1 else merged(op, here + noise * stdev, here)
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
    op, k, n = net.op, net.chunk, len(points.rows[0])
    rounds = -(-n // k)
    scale = np.ones(n) if weights is None else weights
    rows = [np.concatenate([a, np.repeat(a[-1:], rounds * k - n)]) for a in points.rows]
    scale = np.concatenate([scale, np.zeros(rounds * k - n)])
    rows = [a.reshape(rounds, k)[:, 0] if k == 1 else a.reshape(rounds, k) for a in (*rows, scale)]
    kept = [i for i, y in enumerate(zeros) if y is not None and weights is not None]

    def body(row: list[Var], states: list[Var]) -> tuple[list[Var], list[Var]]:
        found = [y if k == 1 else split(op, y, k) for y in evaluate(points.at(row[:-1], k), k)]
        if weights is None:
            return [], found
        parts = [_weighed(op, y, row[-1], k) for y in found]
        sums = [states[j] + parts[i] for j, i in enumerate(kept)]
        return sums, [y for i, y in enumerate(parts) if i not in kept]

    wide = any(x.dtype == DOUBLE for x in net.sites)
    rows = [a if a.dtype.kind == "i" or wide else a.astype(np.float32) for a in rows]
    sums, stacks = looped(op, rows, [y for i in kept if (y := zeros[i]) is not None], body, unroll)
    if weights is None:
        return [y if k == 1 else op.Slice(merged(op, y, _row(op, y)), [0], [n], [0]) for y in stacks]
    totals = iter(op.ReduceSum(y, [0], keepdims=0) for y in stacks)
    done = dict(zip(kept, sums, strict=True))
    return [done[i] if i in done else next(totals) for i in range(len(zeros))]


def _row(op: Builder, y: Var) -> Var:
    """Return the first row of ``y``, for its shape."""
    return op.Gather(y, 0)


def _weighed(op: Builder, y: Var, weight: Var, rows: int) -> Var:
    """Return ``y`` times ``weight``; with several ``rows``, the sum of its rows times a vector of weights."""
    weight = op.cast(weight, y.dtype)
    if rows == 1:
        return y * weight
    return op.ReduceSum(y * op.Reshape(weight, [-1, *[1] * (y.rank - 1)]), [0], keepdims=0)


def baselines_of(
    net: Net, given: Baseline, names: Mapping[ir.Value, str], word: str = "baseline"
) -> dict[ir.Value, Var]:
    """Return the baseline of each site, in the shape of the site.

    Args:
        given: a number; an array of the shape of the site, or of one row of it; a dict of them by name; or ``"input"``,
            for new inputs ``"<name>.baseline"``.
        names: the name of each site in messages and for inputs.
    """
    if isinstance(given, Mapping):
        check_entries(given, list(names.values()), word)
    found = {}
    for x, name in names.items():
        value = value_of(net, given[name] if isinstance(given, Mapping) else given, x, name, word)
        shape = net.op.shape(net.op.wrap(x))
        found[x] = (
            net.op.full(shape, n, value.dtype) if (n := _number(value)) is not None else net.op.Expand(value, shape)
        )
        record_shape(found[x].value, None if x.shape is None else as_dims(x.shape))
    return found


def check_entries(given: Mapping[str, Any], names: Sequence[str], word: str, others: Sequence[str] = ()) -> None:
    """Raise an error unless ``given`` has an entry for each of ``names``, and none besides those of ``others``."""
    unknown = [n for n in given if n not in names and n not in others]
    missing = [n for n in names if n not in given]
    if unknown or missing:
        what = f"names '{shown(unknown[0])}'" if unknown else f"has no entry for '{shown(missing[0])}'"
        raise BuildError(f"the {word} {what}; pass one for each of {', '.join(map(shown, names))}")


def _number(value: Var) -> float | None:
    return None if value.const is None or value.const.ndim else value.const.item()


def value_of(net: Net, given: Any, x: ir.Value, name: str, word: str) -> Var:
    """Return ``given`` for the value ``x``: a number or array of its type that broadcasts to it, or a new input."""
    op, here = net.op, net.op.wrap(x)
    if isinstance(given, str) and given == "input":
        value = ir.Value(name=op.fresh(f"{name}.{word}"), type=x.type, shape=x.shape)
        net.graph.inputs.append(value)
        return op.wrap(value)
    try:
        array = np.asarray(given if given is not None else "", here.dtype.numpy())  # NumPy makes NaN of None
    except (TypeError, ValueError):
        raise BuildError(f"the {word} is {described(given)}; pass a number, an array or 'input'") from None
    shape = None if x.shape is None else as_dims(x.shape)
    if shape is not None and array.ndim and not _fits(array.shape, shape):
        raise BuildError(
            f"the {word} of '{shown(name)}' has shape {list(array.shape)}, but '{shown(name)}' has shape "
            f"{list(shape)}; pass a number, or an array of this shape or of one sample"
        )
    return op.const(array)


def _fits(mine: Sequence[int], shape: Sequence[int | str | None]) -> bool:
    """Whether an array of shape ``mine`` is a value, or a row, for a tensor of ``shape``."""
    if len(mine) not in (len(shape), len(shape) - 1):
        return False
    tail = list(zip(mine[::-1], shape[::-1], strict=False))
    first = len(mine) == len(shape)
    return all(
        a == b or not isinstance(b, int) or (first and i == len(tail) - 1 and a == 1) for i, (a, b) in enumerate(tail)
    )


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

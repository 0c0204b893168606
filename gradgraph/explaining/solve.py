"""``gg.solve``: find the input for which a model returns a given output, in one ONNX model.

Least squares by the method of Levenberg and Marquardt: each step solves (JᵀJ + λI) p = -Jᵀr by conjugate gradients,
from products with J (forward mode) and Jᵀ (reverse mode), so that no Jacobian is stored.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import ABOVE_ZERO, FLAG, number, one_of
from gradgraph.autodiff.calls import Call, Net, batch_of, looped
from gradgraph.autodiff.forward import append_jvp
from gradgraph.autodiff.projected_steps import BOUNDS
from gradgraph.autodiff.select import Names, find_path, select, target_of
from gradgraph.autodiff.site_values import baselines_of, value_of
from gradgraph.backends import named
from gradgraph.backends.engine import unrolls
from gradgraph.errors import BuildError, shown
from gradgraph.explaining.along import UNROLL
from gradgraph.files.models import Source
from gradgraph.graph.builder import Var
from gradgraph.graph.shapes import all_sizes
from gradgraph.transforms import Append, transform

_KEPT = 0.005  # the least part of the distance to a bound that a step keeps, as in SciPy
METHODS = ("levenberg-marquardt", "gauss-newton")
MOST_CG = 50  # conjugate-gradient steps by default, if there are more unknowns


@transform(n=ABOVE_ZERO, method=one_of(METHODS), bounds=BOUNDS, damping=number(0, above=True), cg=ABOVE_ZERO.or_none(),
           per_sample=FLAG, unroll=UNROLL)  # fmt: skip
def solve(
    model: Source,
    n: int = 20,
    *,
    wrt: Names = None,
    output: str | None = None,
    target: Any = "input",
    method: str = "levenberg-marquardt",
    bounds: tuple[Any, Any] | None = None,
    damping: float = 1e-3,
    cg: int | None = None,
    per_sample: bool = False,
    unroll: bool | None = None,
    backend: str = "portable",
    opset: int | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Append:
    """Return a model that finds the inputs or weights for which ``output`` is nearest to a target, by least squares.

    It starts from the values that are fed or stored, and takes ``n`` steps. For other losses, and for models with
    millions of unknowns, see ``iterate``.

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        n: the number of steps.
        wrt: names and globs of the inputs or initializers to solve for; by default all floating-point inputs.
        output: the output; by default the first that depends on an input.
        target: what the output should be: ``"input"``, for a new input ``"<output>.target"``; or a number or an array.
        method: ``"levenberg-marquardt"``, which only takes steps that decrease the error, or ``"gauss-newton"``.
        bounds: the lowest and the highest value, each a number, an array or None; approached from inside.
        damping: λ of the first step, relative to the curvature along the gradient. Afterwards λ is divided by 10 after
            each step that decreases the error, and multiplied by 10 after others.
        cg: the conjugate-gradient steps in each step; by default the number of unknowns, at most 50.
        per_sample: solve for each sample of the batch on its own. A model that mixes samples, or might, raises
            DifferentiationError.
        unroll: as for ``along``.

    Returns:
        The same kind of model as ``model``, with ``output`` at the solution, ``"<name>.result"``, the solution, and
        ``"<output>.history"``, half the sum of squared residuals before each step: [n], or [n, batch].

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError: as for ``value_and_grad``.
        BuildError: if a bound or the target has another shape.
    """
    options = Options(n, METHODS.index(method) == 0, damping, cg, per_sample, unrolls(named(backend), unroll))

    def append(work: ir.Model, named_operators: bool) -> ir.Model:
        y = target_of(work.graph, output)
        given = [x.name or "" for x in work.graph.inputs if x.dtype is not None and x.dtype.is_floating_point()]
        path = find_path(work, [y], select(work.graph, given if wrt is None else wrt, [y], inner=False))
        if per_sample:
            others = [x for x in path.wrt if x not in batch_of(work.graph, path, "use per_sample=False")]
            if others:
                raise BuildError(f"'{shown(others[0].name)}' has no row for each sample; use per_sample=False")
        names, name = [x.name or "" for x in path.wrt], y.name or ""
        work.graph.outputs[:] = path.targets
        append_jvp(work, None, names, named_operators=named_operators)
        known = {x.name: x for x in (*work.graph.inputs, *work.graph.initializers.values())}
        y, tangent = work.graph.outputs
        places = work.graph.inputs[-len(names) :]
        net = Net(work, [*(known[x] for x in names), *places], [y, tangent], named_operators=named_operators)
        for place in places:
            net.graph.inputs.remove(place)
        solver = _Solver(net, net.sites[: len(names)], places, y, tangent, options, bounds)
        last, history = solver.solution(value_of(net, target, y, name, "target"))
        found = [net.named(solver.call(last, last)[y], name)]
        found += [net.named(x, f"{site.name}.result") for x, site in zip(last, solver.unknowns, strict=True)]
        return net.finish([*found, net.named(history, f"{name}.history")])

    return append


@dataclass(frozen=True)
class Options:
    """The options of ``solve``."""

    n: int
    damped: bool
    damping: float
    cg: int | None
    per_sample: bool
    unroll: bool


Vars = Sequence[Var]


class _Solver:
    """The steps of a solution. Vectors of unknowns are lists with one tensor for each of ``wrt``."""

    def __init__(
        self, net: Net, unknowns: Sequence[ir.Value], places: Sequence[ir.Value], y: ir.Value, tangent: ir.Value,
        options: Options, bounds: tuple[Any, Any] | None,
    ) -> None:  # fmt: skip
        self.net, self.op, self.unknowns, self._places = net, net.op, list(unknowns), list(places)
        self._y, self._tangent, self._options = y, tangent, options
        self._start = [self.op.wrap(x) for x in self.unknowns]
        low, high = (None, None) if bounds is None else bounds
        self._low, self._high = self._bound(low, "lower bound"), self._bound(high, "upper bound")

    def call(self, x: Vars, v: Vars) -> Call:
        """Call the model at ``x`` with tangents ``v``."""
        return self.net.call(dict(zip([*self.unknowns, *self._places], [*x, *v], strict=True)))

    def _bound(self, given: Any, word: str) -> list[Var | None]:
        names = {x: x.name or "" for x in self.unknowns}
        return [None] * len(names) if given is None else list(baselines_of(self.net, given, names, word).values())

    def _inside(self, x: Vars, target: Vars) -> list[Var]:
        """Return ``target``, moved so that it keeps at least a part of the distance of ``x`` to the bounds."""
        op, found = self.op, []
        for a, b, low, high in zip(x, target, self._low, self._high, strict=True):
            b = b if low is None else op.Max(b, low * (1 - _KEPT) + a * _KEPT)
            found.append(op.like(b if high is None else op.Min(b, high * (1 - _KEPT) + a * _KEPT), a))
        return found

    def _scales(self, x: Vars, slope: Vars) -> tuple[list[Var], list[Var]]:
        """Return the scale of each unknown, and the curvature that its changes add.

        The scale is the root of the distance to the bound in the direction of -``slope``, and the curvature |slope|;
        unknowns without such a bound have 1 and 0.
        """
        op, roots, extra = self.op, [], []
        for a, g, low, high in zip(x, slope, self._low, self._high, strict=True):
            gap, more = op.ones_like(a), op.zeros_like(a)
            if low is not None:
                falls = (g > 0.0) & op.Not(op.IsInf(low))
                gap, more = op.Where(falls, a - low, gap), op.Where(falls, g, more)
            if high is not None:
                rises = (g < 0.0) & op.Not(op.IsInf(high))
                gap, more = op.Where(rises, high - a, gap), op.Where(rises, -g, more)
            roots.append(op.like(op.Sqrt(gap), a))
            extra.append(op.like(more, a))
        return roots, extra

    def solution(self, goal: Var) -> tuple[list[Var], Var]:
        """Return the solution, and the history of the error."""
        op, options, count = self.op, self._options, len(self.unknowns)
        begin = self._start_inside()
        cost = self._cost(begin, goal)
        first = self.call(begin, begin)
        slope = self._pulled(first, first[self._y] - goal)
        steep = self.call(begin, slope)[self._tangent]
        size = self._dot(slope, slope)
        curvature = self._over(self._rows(steep * steep), size) * options.damping
        damping = op.Max(curvature, 1e-12) if options.damped else curvature * 0.0

        def body(_: list[Var], states: list[Var]) -> tuple[list[Var], list[Var]]:
            x, damping, cost = states[:count], states[count], states[count + 1]
            step = self._step(x, damping, goal)
            moved = self._inside(x, [a + b for a, b in zip(x, step, strict=True)])
            after = self._cost(moved, goal)
            if not options.damped:
                return [*moved, damping, after], [cost]
            better = op.Less(after, cost)
            kept = [op.like(op.Where(self._spread(better, a), b, a), a) for a, b in zip(x, moved, strict=True)]
            damping = op.Clip(op.Where(better, damping * 0.1, damping * 10.0), 1e-12, 1e12)
            return [*kept, damping, op.Where(better, after, cost)], [cost]

        states, (history,) = looped(op, [np.arange(options.n)], [*begin, damping, cost], body, options.unroll)
        return states[:count], history

    def _start_inside(self) -> list[Var]:
        """Return the start; on and outside of bounds, a point next to them."""
        op, found = self.op, []
        for x, low, high in zip(self._start, self._low, self._high, strict=True):
            size = 1e-3 if low is None or high is None else op.Min(1e-3, (high - low) * 1e-3)
            x = x if low is None else op.Max(x, low + size)
            found.append(x if high is None else op.Min(x, high - size))
        return [op.like(a, b) for a, b in zip(found, self._start, strict=True)]

    def _step(self, x: Vars, damping: Var, goal: Var) -> list[Var]:
        """Return the solution p of (JᵀJ + λI) p = -Jᵀr by conjugate gradients.

        With bounds, the unknowns are scaled by the roots of their distances to them (Coleman and Li 1996,
        doi:10.1137/0806023), as in SciPy's ``least_squares``.
        """
        op = self.op
        here = self.call(x, x)
        slope = self._pulled(here, here[self._y] - goal)
        roots, extra = self._scales(x, slope)
        size, count = self._unknowns(), len(x)

        def body(_: list[Var], states: list[Var]) -> tuple[list[Var], list[Var]]:
            p, r, d, rr = states[:count], states[count : 2 * count], states[2 * count : 3 * count], states[-1]
            call = self.call(x, [a * b for a, b in zip(d, roots, strict=True)])
            pulled = self._pulled(call, call[self._tangent])
            rows = zip(pulled, d, roots, extra, strict=True)
            product = [g * root + v * (more + self._spread(damping, v)) for g, v, root, more in rows]
            alpha = self._over(rr, self._dot(d, product))
            p = [a + b * self._spread(alpha, b) for a, b in zip(p, d, strict=True)]
            r = [a - b * self._spread(alpha, b) for a, b in zip(r, product, strict=True)]
            new = self._dot(r, r)
            d = [a + b * self._spread(self._over(new, rr), b) for a, b in zip(r, d, strict=True)]
            return [*(op.like(a, b) for a, b in zip([*p, *r, *d], states, strict=False)), new], []

        down = [op.like(-g * root, a) for g, root, a in zip(slope, roots, x, strict=True)]
        begin = [*(op.zeros_like(a) for a in x), *down, *down, self._dot(down, down)]
        states, _ = looped(op, [np.arange(self._options.cg or min(size or MOST_CG, MOST_CG))], begin, body,
                           self._options.unroll)  # fmt: skip
        return [p * root for p, root in zip(states[:count], roots, strict=True)]

    def _pulled(self, call: Call, seed: Var) -> list[Var]:
        y = call[self._y]
        return list(call.gradients(y, self.op.like(seed, y), self.unknowns).values())

    def _cost(self, x: Vars, goal: Var) -> Var:
        r = self.call(x, x)[self._y] - goal
        return self._rows(r * r) * 0.5

    def _unknowns(self) -> int | None:
        shapes = [(x.shape or (None,))[int(self._options.per_sample) :] for x in self._start]
        sizes = [all_sizes(shape) for shape in shapes]
        return None if any(s is None for s in sizes) else max(1, sum(math.prod(s or ()) for s in sizes))

    def _dot(self, a: Vars, b: Vars) -> Var:
        return self.op.sum_of([self._rows(x * y) for x, y in zip(a, b, strict=True)])

    def _rows(self, x: Var) -> Var:
        """Return the sum of ``x``, or the sum of each row."""
        axes = np.arange(int(self._options.per_sample), x.rank)
        return self.op.ReduceSum(x, axes, keepdims=0) if len(axes) else x

    def _spread(self, number: Var, like: Var) -> Var:
        """Return a number, or one for each row, in a shape that broadcasts to ``like``."""
        if not self._options.per_sample or like.rank == 1:
            return number
        return self.op.Reshape(number, [-1, *[1] * (like.rank - 1)])

    def _over(self, above: Var, below: Var) -> Var:
        """Return ``above / below``, or 0 where ``below`` is 0."""
        zero = self.op.Equal(below, 0.0)
        return self.op.Where(zero, 0.0, above / self.op.Where(zero, 1.0, below))

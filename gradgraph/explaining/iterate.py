"""``gg.iterate``: repeat x ← update(x, gradient) a fixed number of times, in one ONNX model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import ABOVE_ZERO, FLAG, described, number, one_of
from gradgraph.autodiff.append import builder_for
from gradgraph.autodiff.calls import Net, Points
from gradgraph.autodiff.path import carries
from gradgraph.autodiff.projected_steps import BOUNDS, NORMS, Ball, Rule, iterated, projection
from gradgraph.autodiff.select import Names, check_scalar, find_path, select, target_of
from gradgraph.backends import named
from gradgraph.backends.engine import unrolls
from gradgraph.building.objective import objectives_of
from gradgraph.building.step_options import StepOptions
from gradgraph.errors import BuildError
from gradgraph.explaining.along import SEED, UNROLL
from gradgraph.files.models import Source
from gradgraph.frontend.tensor import Tensor
from gradgraph.frontend.trace import Trace, Value, tensor, tracing, wrap
from gradgraph.graph.builder import Builder, Var
from gradgraph.optim import Optimizer
from gradgraph.optim.schedules import Schedule
from gradgraph.optim.transform import Transform, Vars
from gradgraph.optim.weight_groups import RECIPES
from gradgraph.passes.randomness import FLOAT, RandomSource, initial_state
from gradgraph.transforms import Append, transform

Update: TypeAlias = "str | Optimizer | Callable[[Tensor, Tensor], Tensor]"


@transform(n=ABOVE_ZERO, maximize=FLAG, bounds=BOUNDS, norm=one_of(NORMS).or_none(), radius=number(0).or_none(),
           per_sample=FLAG, random_start=FLAG, seed=SEED, unroll=UNROLL)  # fmt: skip
def iterate(
    model: Source,
    n: int,
    *,
    update: Update,
    wrt: Names = None,
    output: str | None = None,
    loss: Any = None,
    maximize: bool = False,
    bounds: tuple[Any, Any] | None = None,
    norm: str | None = None,
    radius: float | None = None,
    per_sample: bool = True,
    random_start: bool = False,
    seed: int = 0,
    unroll: bool | None = None,
    backend: str = "portable",
    opset: int | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Append:
    """Return a model that repeats ``x ← update(x, gradient)`` ``n`` times, from the value that is fed for ``x``.

    The gradient is that of a scalar output or of a loss. This covers adversarial attacks, the inversion of a model, and
    inputs that maximise a feature::

        attack = gg.iterate(model, 10, wrt="x", loss="cross_entropy", maximize=True, bounds=(0, 1), norm="linf",
                            radius=8 / 255, update=lambda x, g: x - 2 / 255 * F.sign(g))

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        n: the number of updates.
        update: an optimizer, such as ``gg.optim.adam(0.1)``, or its name; or a function of two traced tensors, the
            value and its gradient, that returns the new value.
        wrt: names and globs of the inputs or initializers to update; by default all floating-point inputs. Inputs and
            initializers start from the values that are fed or stored.
        output: the scalar output to minimise, or the output that ``loss`` reads.
        loss: a loss, as for ``gradgraph.build``; its targets become inputs. By default, ``output`` itself is minimised.
        maximize: maximise instead; ``update`` then receives the negated gradient.
        bounds: the lowest and the highest value, each a number, an array or None for no bound.
        norm: ``"linf"`` or ``"l2"``: keep the change within ``radius`` in this norm. The bounds apply afterwards.
        radius: the radius.
        per_sample: the norm is that of each row of a tensor along its first axis, otherwise of the whole tensor. For
            initializers, it is always that of the whole tensor.
        random_start: start from a random point within ``radius``.
        seed: the seed of the random start.
        unroll: as for ``along``.

    Returns:
        The same kind of model as ``model``, with the original outputs at the last value, then ``"<name>.result"``, the
        last value of each of ``wrt``, and ``"<output>.history"`` [n], what was minimised before each update.

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError: as for ``value_and_grad``.
        BuildError: if the optimizer has groups, averages or the like, or the loss does not match the model.
    """
    if (norm is None) != (radius is None):
        raise BuildError("a constraint needs a norm and a radius; pass both, such as norm='linf', radius=0.03")
    if random_start and norm is None:
        raise BuildError("a random start needs a radius; pass norm and radius, or remove random_start")
    if seed and not random_start:
        raise BuildError("seed selects the random start; pass random_start=True, or remove seed")
    ball = None if norm is None or radius is None else Ball(norm, radius, per_sample)
    rule, unrolled = updater(update), unrolls(named(backend), unroll)

    def append(work: ir.Model, named_operators: bool) -> ir.Model:
        outputs = [y.name or "" for y in work.graph.outputs]
        inputs = [x.name or "" for x in work.graph.inputs if carries(x)]
        target = loss_of(work, output, loss)
        path = find_path(work, [target], select(work.graph, inputs if wrt is None else wrt, [target], inner=False))
        known = {y.name: y for node in work.graph for y in node.outputs} | {y.name: y for y in work.graph.outputs}
        target, results = path.targets[0], [known[name] for name in outputs]
        net = Net(work, path.wrt, [*dict.fromkeys([target, *results])], named_operators=named_operators)
        start: Points = net.here()
        project = projection(net, bounds, ball)
        if random_start and ball is not None:
            source = RandomSource(net.op.const(initial_state(seed)))
            start = project({x: v + ball.draw(net.op, source, v) for x, v in start.items()})

        def gradients(points: Points) -> tuple[Points, list[Var]]:
            call = net.call(points)
            y = call[target]
            found = call.gradients(y, net.op.zeros_like(y) + (-1.0 if maximize else 1.0), net.sites)
            return found, [net.op.Reshape(y, np.zeros(0, np.int64))]

        last, (history,) = iterated(net, n, gradients, rule, start, project, unrolled)
        call = net.call(last)
        found = [net.named(call[y], name) for y, name in zip(results, outputs, strict=True)]
        found += [net.named(last[x], f"{x.name}.result") for x in net.sites]
        return net.finish([*found, net.named(history, f"{target.name}.history")])

    return append


def loss_of(work: ir.Model, output: str | None, loss: Any) -> ir.Value:
    """Return the scalar ``output`` of ``work``, or the value of ``loss`` after adding its nodes and inputs."""
    if loss is None:
        target = target_of(work.graph, output)
        check_scalar(target)
        return target
    objective, _ = objectives_of(StepOptions(loss=loss, output=output, metrics=()), work)
    op = builder_for(work)
    written = objective(work.graph).emit(op, work.graph)
    op.finish(work.graph)
    return written.loss


# --- updates ------------------------------------------------------------------------------------------------------


@dataclass
class _ByOptimizer(Rule):
    """The update of an optimizer; its slots and scalars are the state."""

    transforms: Sequence[Transform] = ()
    _keys: list[tuple[int, str, int]] = field(default_factory=list)  # transform, slot and parameter of each slot tensor
    _scalars: list[str] = field(default_factory=list)

    def begin(self, op: Builder, params: Vars) -> list[Var]:
        found = []
        for i, one in enumerate(self.transforms):
            try:
                slots = one.init(op, params)
            except ValueError:  # sizes that are names
                shape = next(list(p.shape or ()) for p in params)
                raise BuildError(
                    f"the optimizer needs tensors of fixed sizes for its '{one.name}', but a tensor has shape {shape}; "
                    "export the model with fixed sizes, or choose another optimizer"
                ) from None
            for slot, values in slots.items():
                for j, value in enumerate(values):
                    if value is not None:
                        self._keys.append((i, slot, j))
                        found.append(value)
        kept, trial = len(op.nodes), _Iteration(op, op.const(np.int64(0)))
        self._through(op, params, params, found, trial)  # to find the scalars
        del op.nodes[kept:]
        self._scalars = list(trial.begin)
        return [*found, *(op.const(np.float32(value)) for value in trial.begin.values())]

    def step(
        self, op: Builder, params: Vars, gradients: Vars, state: Sequence[Var], index: Var
    ) -> tuple[list[Var], list[Var]]:
        slots, scalars = state[: len(self._keys)], state[len(self._keys) :]
        iteration = _Iteration(op, index, dict(zip(self._scalars, scalars, strict=True)))
        moved, new = self._through(op, params, gradients, slots, iteration)
        return moved, [*new, *(iteration.after[name] for name in self._scalars)]

    def _through(
        self, op: Builder, params: Vars, gradients: Vars, state: Sequence[Var], context: _Iteration
    ) -> tuple[list[Var], list[Var]]:
        held, after = dict(zip(self._keys, state, strict=True)), dict[tuple[int, str, int], Var]()
        flow: Vars = gradients
        for i, one in enumerate(self.transforms):
            names = dict.fromkeys(slot for k, slot, _ in self._keys if k == i)
            mine = {slot: [held.get((i, slot, j)) for j in range(len(params))] for slot in names}
            flow, new = one.update(op, flow, mine, params, context)
            for slot, values in new.items():
                after.update(((i, slot, j), v) for j, v in enumerate(values) if v is not None)
        return [op.like(p + d, p) for p, d in zip(params, flow, strict=True)], [after[key] for key in self._keys]


@dataclass
class _Iteration:
    """The ``optim.transform.Context`` of an iteration."""

    op: Builder
    index: Var
    held: dict[str, Var] = field(default_factory=dict)
    begin: dict[str, float] = field(default_factory=dict)
    after: dict[str, Var] = field(default_factory=dict)

    def step(self) -> Var:
        return self.index

    def hyperparameter(self, name: str, default: float) -> Var:
        return self.op.const(np.float32(default))

    def scheduled(self, by: Schedule, leads: bool = True) -> Var:
        return by.emit(self.op, self.op.cast(self.index, FLOAT))

    def scalar(self, name: str, begin: float, advance: Callable[[Var], Var]) -> Var:
        self.begin[name] = begin
        now = self.held.get(name) or self.op.const(np.float32(begin))
        self.after[name] = advance(now)
        return now


def updater(update: Update) -> Rule:
    """Return the rule for an optimizer, its name, or a function of traced tensors."""
    if callable(update) and not isinstance(update, Optimizer):
        return Rule(partial(_traced, update))
    optimizer = RECIPES.given(update)
    if optimizer.groups or optimizer.after or optimizer.ascent or optimizer.pruning or optimizer.keeps_master:
        raise BuildError(
            f"the optimizer {optimizer.name} has groups, averages, lookahead, SAM, pruning or float32 copies, which "
            "iterate does not support; pass a plain one, such as gradgraph.optim.adam(0.1)"
        )
    return _ByOptimizer(lambda op, p, g: p, optimizer.transforms)


def _traced(function: Callable[[Tensor, Tensor], Tensor], op: Builder, x: Var, gradient: Var) -> Var:
    with tracing(Trace({}, builder=op)):
        try:
            result = function(wrap(x), wrap(gradient))
        except TypeError as error:
            raise BuildError(
                f"update failed: {error}; it is called with two tensors, the value and its gradient"
            ) from error
        if not isinstance(result, Value):
            raise BuildError(f"update returned {described(result)}; return the new value, a tensor")
        found = tensor(result, x.dtype).traced
    if found.shape is not None and x.shape is not None and len(found.shape) != len(x.shape):
        raise BuildError(
            f"update returned a tensor of shape {list(found.shape)}; return the shape of x, {list(x.shape)}"
        )
    return found

"""An optimizer is a chain of transforms, and a transform is two emitters, ``init`` and ``update``.

``init`` writes the starting state as nodes of init.onnx (zeros from ConstantOfShape, so that the file stays small);
``update`` writes one step as nodes of train.onnx. State is plain named tensors: a slot holds one tensor per
parameter. The parameters grow by the last transform's result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import onnx_ir as ir

from gradgraph.arguments import Kind, checked, instance
from gradgraph.errors import BuildError
from gradgraph.graph.builder import Builder, Var
from gradgraph.optim.pruning import Pruning
from gradgraph.optim.schedules import Schedule

__all__ = [
    "Context", "Optimizer", "Transform", "chain", "copies", "master_weights", "parameterwise", "stateless", "zeros",
]  # fmt: skip

Vars = Sequence[Var]
Slots = Mapping[str, Sequence[Any]]  # of Vars; None for a parameter that has no such slot


class Context(Protocol):
    """The step that an update is part of, as far as the update may ask."""

    def step(self) -> Var:
        """The number of finished steps, an int64 scalar (0 during the first); asking for it makes it state.

        For weights of a group that begins later (``start``), of those since then.
        """
        ...

    def hyperparameter(self, name: str, default: float) -> Var:
        """A float32 scalar that is fed per call."""
        ...

    def scheduled(self, by: Schedule, leads: bool = True) -> Var:
        """The rate that a schedule gives in this step, a float32 scalar; its clock is that of the run.

        The rate of the first one that ``leads`` is the learning rate of the step.
        """
        ...

    def scalar(self, name: str, begin: float, advance: Callable[[Var], Var]) -> Var:
        """A float32 scalar of state: ``begin`` in the first step, and after each step ``advance`` of what it was."""
        ...


Init = Callable[[Builder, Vars], Slots]
Update = Callable[[Builder, Vars, Slots, Vars, Context], tuple[Vars, Slots]]
Factor = Callable[[Builder, Context], Var]


@dataclass(frozen=True)
class Line:
    """How a parameter moves along a direction d: ``p ← keep·p + rate·d``; both are float32 scalars.

    Args:
        rate: the product of the factors behind d.
        keep: ``None`` for 1.
    """

    rate: Var
    keep: Var | None


Apply = Callable[[Builder, Vars, Slots, Vars, Context, Line], tuple[Vars, Slots]]


def no_state(op: Builder, params: Vars) -> Slots:
    """The ``init`` of a transform without state."""
    return {}


@dataclass(frozen=True)
class Transform:
    """One link of a chain.

    Args:
        name, arguments: for the manifest.
        update: ``update(op, gradients, slots, params, context) -> (new gradients, new slots)``.
        init: ``init(op, params) -> {slot: one Var per parameter}``; None for a parameter that has no such slot.
        factor: ``factor(op, context) -> float32 scalar`` of a transform that does nothing but multiply by it: a
            backward pass is linear, so the loss's cotangent can take the factor, at no cost per parameter.
        decay: of a transform that does nothing but add ``decay·p``.
        apply: ``apply(op, gradients, slots, params, context, line) -> (new params, new slots)``: this transform and,
            as ``line``, those behind it, written at once; for parameters in float32.
        averages: a slot that evaluation reads in place of the parameters.
    """

    name: str
    update: Update
    init: Init = no_state
    arguments: Mapping[str, Any] = field(default_factory=dict)
    factor: Factor | None = None
    decay: float | None = None
    apply: Apply | None = None
    averages: str | None = None


@dataclass(frozen=True)
class Group:
    """Weights that share an optimizer.

    Args:
        members: their places in the list of trained weights.
        start: the update from which on they move.
    """

    transforms: tuple[Transform, ...]
    members: tuple[int, ...]
    start: int = 0


class Groups(Protocol):
    """The groups of an optimizer's weights; ``weight_groups.GroupRules`` finds them."""

    @property
    def base(self) -> float | Schedule:
        """The learning rate of weights that no rule names: the number behind the input ``learning_rate``, or a
        schedule.
        """
        ...

    @property
    def globs(self) -> Sequence[str]:
        """The globs of the groups."""
        ...

    @property
    def no_decay(self) -> Sequence[str]:
        """The globs of weights without decay."""
        ...

    def resolve(self, graph: ir.Graph, params: Sequence[ir.Value]) -> list[Group]:
        """The groups of ``params``, which are initializers of ``graph``."""
        ...


@dataclass(frozen=True)
class Optimizer:
    """Transforms in the order in which gradients pass through them, under one name for the manifest.

    Args:
        keeps_master: float16 parameters have float32 copies as state; transforms see these, and gradients in float32.
        groups: further transforms, which differ from parameter to parameter.
        after: transforms of the new parameters, which they get and give in place of gradients.
        ascent: gives of the gradients a displacement of the parameters, to where the step takes its gradients.
        pruning: which parameters lose their smallest numbers, and when.
    """

    name: str
    transforms: tuple[Transform, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    keeps_master: bool = False
    groups: Groups | None = None
    after: tuple[Transform, ...] = ()
    ascent: Transform | None = None
    pruning: Pruning | None = None

    def wrapped(self, name: str, arguments: Mapping[str, Any], **changed: Any) -> Optimizer:
        """Return a copy with some fields changed, under the name and arguments of what wraps it."""
        return replace(self, name=name, arguments={"optimizer": _described(self), **arguments}, **changed)


_MADE = "optimizers and transforms, such as gradgraph.optim.adamw(1e-3)"


@checked(parts=Kind(f"made of {_MADE}", lambda parts: all(isinstance(p, Transform | Optimizer) for p in parts)))
def chain(*parts: Transform | Optimizer) -> Optimizer:
    """One optimizer that applies ``parts`` one after the other."""
    links = [t for part in parts for t in (part.transforms if isinstance(part, Optimizer) else (part,))]
    optimizers = [part for part in parts if isinstance(part, Optimizer)]
    keeps_master = any(part.keeps_master for part in optimizers)
    special = (part.groups or part.after or part.ascent or part.pruning for part in optimizers if part is not parts[-1])
    if any(special):
        raise BuildError(
            "an optimizer with groups, averages, lookahead, SAM or pruning is the last part of a chain; put the others "
            "before it"
        )
    last = optimizers[-1] if optimizers and parts[-1] is optimizers[-1] else Optimizer("none", ())
    described = {"parts": [_described(p) for p in parts]}
    return Optimizer("chain", tuple(links), described, keeps_master, last.groups, last.after, last.ascent,
                     last.pruning)  # fmt: skip


@checked(optimizer=instance(Optimizer, _MADE))
def master_weights(optimizer: Optimizer) -> Optimizer:
    """``optimizer`` on float32 copies of float16 weights: they and its slots are float32 state, and the model computes
    with what they round to. So small updates add up, and squares of gradients do not vanish.
    """
    return optimizer.wrapped("master_weights", {}, keeps_master=True)


def _described(part: Transform | Optimizer) -> dict[str, Any]:
    return {"name": part.name, "arguments": dict(part.arguments)}


def stateless(name: str, each: Callable[[Builder, Var, Var], Var], **arguments: Any) -> Transform:
    """A transform without state that treats every parameter alike: ``each(op, gradient, parameter)``."""

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        return [each(op, g, p) for g, p in zip(grads, params, strict=True)], {}

    return Transform(name, update, arguments=arguments)


Each = Callable[..., tuple[Var, Mapping[str, Var]]]
Numbers = Callable[[Builder, Context], Sequence[Var]]


def parameterwise(
    name: str,
    arguments: Mapping[str, Any],
    each: Each,
    init: Init = no_state,
    numbers: Numbers | None = None,
) -> Transform:
    """A transform that treats every parameter by itself.

    Args:
        name, arguments: for the manifest.
        each: ``each(op, gradient, parameter, slots, *numbers) -> (direction, new slots)``.
        numbers: scalars that all parameters share; ``each`` gets them in the type of the gradient.
    """

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        shared = numbers(op, context) if numbers is not None else ()
        cast = {d: [op.cast(n, d) for n in shared] for d in dict.fromkeys(g.dtype for g in grads)}
        directions = list[Var]()
        after: dict[str, list[Var | None]] = {slot: [None] * len(grads) for slot in slots}
        for i, (g, p) in enumerate(zip(grads, params, strict=True)):
            mine = {slot: values[i] for slot, values in slots.items() if values[i] is not None}
            direction, new = each(op, g, p, mine, *cast[g.dtype])
            directions.append(direction)
            for slot, value in new.items():
                after[slot][i] = value
        return directions, after

    return Transform(name, update, init, arguments)


def zeros(*slots: str) -> Init:
    """An ``init`` whose slots start as zeros, shaped like the parameters."""

    def init(op: Builder, params: Vars) -> Slots:
        return {slot: [op.zeros_like(p) for p in params] for slot in slots}

    return init


def copies(*slots: str) -> Init:
    """An ``init`` whose slots start as the parameters."""

    def init(op: Builder, params: Vars) -> Slots:
        return {slot: [op.Identity(p) for p in params] for slot in slots}

    return init


def joined(transforms: Sequence[Transform]) -> tuple[list[Transform], Transform | None]:
    """The first transforms, and the others as one that gives new parameters; ``None`` where they cannot be joined.

    They can be joined if only scaling and decay follow a transform that has ``apply``.
    """
    head, tail = list(transforms), list[Transform]()
    while head and (head[-1].factor is not None or head[-1].decay is not None):
        tail.insert(0, head.pop())
    apply = head[-1].apply if head and tail else None
    if apply is None:
        return list(transforms), None

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        return apply(op, grads, slots, params, context, _line(op, tail, context))

    return head[:-1], replace(head[-1], update=update)


def _line(op: Builder, tail: Sequence[Transform], context: Context) -> Line:
    rate, drift = op.const(1.0), op.const(0.0)
    for transform in tail:
        if transform.factor is not None:
            factor = transform.factor(op, context)
            rate, drift = rate * factor, drift * factor
        elif transform.decay is not None:
            drift = drift + transform.decay
    return Line(rate, drift + 1.0 if any(t.decay for t in tail) else None)

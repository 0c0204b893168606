"""Optimizers as chains of transforms; a transform consists of two functions that write nodes, ``init`` and ``update``.

``init`` writes the initial state as nodes of init.onnx (zeros by ConstantOfShape, so that the file stays small);
``update`` writes one step as nodes of train.onnx. State is plain named tensors: a slot has one tensor per parameter.
The result of the last transform is added to the parameters.
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
Slots = Mapping[str, Sequence[Any]]  # by slot, a Var per parameter; None for a parameter that does not have the slot


class Context(Protocol):
    """The step that an update is part of, as seen by transforms."""

    def step(self) -> Var:
        """Return the number of finished steps, an int64 scalar (0 during the first step), which becomes state.

        For weights of a group with ``start``, this counts from the first update of the group.
        """
        ...

    def hyperparameter(self, name: str, default: float) -> Var:
        """Return a float32 scalar that is an input of the step, fed per call."""
        ...

    def scheduled(self, by: Schedule, leads: bool = True) -> Var:
        """Return the rate of the schedule ``by`` in this step, a float32 scalar; it counts all steps of the run.

        The first schedule passed with ``leads`` is the learning rate that the step reports.
        """
        ...

    def scalar(self, name: str, begin: float, advance: Callable[[Var], Var]) -> Var:
        """Return a float32 scalar in the state: ``begin`` in the first step, then ``advance`` of its previous value."""
        ...


Init = Callable[[Builder, Vars], Slots]
Update = Callable[[Builder, Vars, Slots, Vars, Context], tuple[Vars, Slots]]
Factor = Callable[[Builder, Context], Var]


@dataclass(frozen=True)
class Line:
    """The update of a parameter along a direction d: ``p ← keep·p + rate·d``; both factors are float32 scalars.

    Args:
        rate: the product of all factors that follow d.
        keep: the factor of p; ``None`` for 1.
    """

    rate: Var
    keep: Var | None


Apply = Callable[[Builder, Vars, Slots, Vars, Context, Line], tuple[Vars, Slots]]


def no_state(op: Builder, params: Vars) -> Slots:
    """Return no slots, as the ``init`` of a transform without state."""
    return {}


@dataclass(frozen=True)
class Transform:
    """One element of an optimizer's chain.

    Args:
        name, arguments: name and arguments for the manifest.
        update: ``update(op, gradients, slots, params, context) -> (new gradients, new slots)``.
        init: ``init(op, params) -> {slot: one Var per parameter}``; None for a parameter that does not have the slot.
        factor: for a transform that only multiplies: ``factor(op, context) -> float32 scalar``. The initial gradient of
            the loss can be multiplied by it instead of every gradient, since the backward pass is linear.
        decay: for a transform that only adds ``decay·p``: this number.
        apply: ``apply(op, gradients, slots, params, context, line) -> (new params, new slots)``: this transform fused
            with the transforms after it, which ``line`` describes; for parameters in float32.
        averages: the slot that evaluation reads instead of the parameters.
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
    """A group of weights that share optimizer settings.

    Args:
        transforms: the transforms of their gradients.
        members: their indices in the list of trained weights.
        start: the number of the first update that changes them.
    """

    transforms: tuple[Transform, ...]
    members: tuple[int, ...]
    start: int = 0


class Groups(Protocol):
    """The parameter groups of an optimizer; ``weight_groups.GroupRules`` implements them."""

    @property
    def base(self) -> float | Schedule:
        """The learning rate of weights in no group: the default of the input ``learning_rate``, or a schedule."""
        ...

    @property
    def globs(self) -> Sequence[str]:
        """The globs of the groups."""
        ...

    @property
    def no_decay(self) -> Sequence[str]:
        """The globs of weights without weight decay."""
        ...

    def resolve(self, graph: ir.Graph, params: Sequence[ir.Value]) -> list[Group]:
        """Return the groups of ``params``, which are initializers of ``graph``."""
        ...


@dataclass(frozen=True)
class Optimizer:
    """A chain of transforms, in the order in which they are applied to gradients, with one name for the manifest.

    Args:
        name, arguments: name and arguments for the manifest.
        transforms: the chain.
        keeps_master: whether float16 parameters have float32 copies in the state; transforms then receive these copies,
            and gradients in float32.
        groups: further transforms, which differ by parameter.
        after: transforms that are applied to the new parameters instead of gradients.
        ascent: maps gradients to a displacement of the parameters, at which the gradients of the step are computed.
        pruning: which parameters are pruned, and when.
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
        """Return a copy with the fields ``changed``, and with the name and arguments of a wrapper for the manifest."""
        return replace(self, name=name, arguments={"optimizer": _described(self), **arguments}, **changed)


_MADE = "optimizers and transforms, such as gradgraph.optim.adamw(1e-3)"


@checked(parts=Kind(f"made of {_MADE}", lambda parts: all(isinstance(p, Transform | Optimizer) for p in parts)))
def chain(*parts: Transform | Optimizer) -> Optimizer:
    """Return one optimizer that applies ``parts`` in sequence.

    Raises:
        BuildError: if a part other than the last has groups, averages, lookahead, SAM or pruning.
    """
    links = [t for part in parts for t in (part.transforms if isinstance(part, Optimizer) else (part,))]
    optimizers = [part for part in parts if isinstance(part, Optimizer)]
    keeps_master = any(part.keeps_master for part in optimizers)
    special = (part.groups or part.after or part.ascent or part.pruning for part in optimizers if part is not parts[-1])
    if any(special):
        raise BuildError(
            "an optimizer with groups, averages, lookahead, SAM or pruning must be the last part of a chain; put the "
            "others before it"
        )
    last = optimizers[-1] if optimizers and parts[-1] is optimizers[-1] else Optimizer("none", ())
    described = {"parts": [_described(p) for p in parts]}
    return Optimizer("chain", tuple(links), described, keeps_master, last.groups, last.after, last.ascent,
                     last.pruning)  # fmt: skip


@checked(optimizer=instance(Optimizer, _MADE))
def master_weights(optimizer: Optimizer) -> Optimizer:
    """``optimizer`` with float32 master copies of float16 weights.

    The copies and the optimizer's slots are float32 state, and the model computes with the copies rounded to float16.
    So small updates accumulate, and squared gradients do not underflow.
    """
    return optimizer.wrapped("master_weights", {}, keeps_master=True)


def _described(part: Transform | Optimizer) -> dict[str, Any]:
    return {"name": part.name, "arguments": dict(part.arguments)}


def stateless(name: str, each: Callable[[Builder, Var, Var], Var], **arguments: Any) -> Transform:
    """Return a transform without state that treats all parameters alike: ``each(op, gradient, parameter)``."""

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
    """Return a transform that treats each parameter separately.

    Args:
        name, arguments: name and arguments for the manifest.
        each: ``each(op, gradient, parameter, slots, *numbers) -> (direction, new slots)``.
        init: writes the initial slots.
        numbers: writes scalars shared by all parameters; they are passed to ``each`` in the type of the gradient.
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
    """Return an ``init`` that fills ``slots`` with zeros, shaped like the parameters."""

    def init(op: Builder, params: Vars) -> Slots:
        return {slot: [op.zeros_like(p) for p in params] for slot in slots}

    return init


def copies(*slots: str) -> Init:
    """Return an ``init`` that copies the parameters into ``slots``."""

    def init(op: Builder, params: Vars) -> Slots:
        return {slot: [op.Identity(p) for p in params] for slot in slots}

    return init


def joined(transforms: Sequence[Transform]) -> tuple[list[Transform], Transform | None]:
    """Fuse the last transforms into one that returns new parameters instead of gradients.

    A transform with ``apply`` can be fused with the transforms after it if these only scale and decay.

    Returns:
        The transforms before the fused one, and the fused one; all transforms and None if none can be fused.
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

"""Descent along the gradient or its sign: SGD, Rprop, Lion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gradgraph.arguments import FINITE
from gradgraph.errors import BuildError
from gradgraph.graph.builder import Builder, Var
from gradgraph.optim.modifiers import Rate
from gradgraph.optim.recipe_parts import check_betas, checked_recipe, decay_links, made, not_negative
from gradgraph.optim.transform import Context, Line, Optimizer, Slots, Transform, Vars, parameterwise, zeros
from gradgraph.optim.updates import momentum_update
from gradgraph.optim.weight_groups import Grouping

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["lion", "momentum", "rprop", "sgd"]


def momentum(decay: float, dampening: float = 0.0, nesterov: bool = False) -> Transform:
    """Return a transform that computes the momentum ``m ← decay·m + (1 − dampening)·g``, starting with ``m ← g``.

    The direction is ``m``, or with ``nesterov`` ``g + decay·m``.
    """

    def update(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context) -> tuple[Vars, Slots]:
        keep: Var | float = 1.0 - dampening
        if dampening:  # without dampening, a buffer of zeros already gives m = g in the first step
            keep = op.Where(op.Equal(context.step(), 0), op.const(1.0), op.const(1.0 - dampening))
        fresh = [g if keep == 1.0 else g * (op.cast(keep, g.dtype) if isinstance(keep, Var) else keep) for g in grads]
        buffers = [decay * m + g for m, g in zip(slots["momentum_buffer"], fresh, strict=True)]
        looking_ahead = [g + decay * m for g, m in zip(grads, buffers, strict=True)] if nesterov else buffers
        return looking_ahead, {"momentum_buffer": buffers}

    def apply(op: Builder, grads: Vars, slots: Slots, params: Vars, context: Context, line: Line) -> tuple[Vars, Slots]:
        new = [
            momentum_update(op, p, g, m, line.rate, line.keep, decay=decay, nesterov=int(nesterov))
            for p, g, m in zip(params, grads, slots["momentum_buffer"], strict=True)
        ]
        return [p for p, _ in new], {"momentum_buffer": [m for _, m in new]}

    arguments = {"decay": decay, "dampening": dampening, "nesterov": nesterov}
    return Transform("momentum", update, zeros("momentum_buffer"), arguments, apply=None if dampening else apply)


@checked_recipe(dampening=FINITE)
def sgd(
    lr: Rate = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """Stochastic gradient descent, as ``torch.optim.SGD``."""
    not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise BuildError("Nesterov momentum requires a momentum above zero and no dampening")
    links = [*decay_links(weight_decay), *momentum_links(momentum, dampening, nesterov)]
    return made(lr, links)


def momentum_links(decay: float, dampening: float = 0.0, nesterov: bool = False) -> list[Transform]:
    return [momentum(decay, dampening, nesterov)] if decay else []


# --- signs -----------------------------------------------------------------------------------------------


def _scale_by_lion(betas: tuple[float, float]) -> Transform:
    """Return a transform that computes Lion's direction ``sign(β₁m + (1−β₁)g)``; afterwards ``m ← β₂m + (1−β₂)g``."""

    def each(op: Builder, g: Var, p: Var, slots: Mapping[str, Var]) -> tuple[Var, Mapping[str, Var]]:
        m = slots["exp_avg"]
        ahead, kept = (m + (1.0 - beta) * (g - m) for beta in betas)
        return op.Sign(ahead), {"exp_avg": kept}

    return parameterwise("scale_by_lion", {"betas": list(betas)}, each, zeros("exp_avg"))


@checked_recipe()
def lion(
    lr: Rate = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, **grouping: Unpack[Grouping]
) -> Optimizer:
    """Sign-momentum updates with decoupled weight decay (Chen et al., arXiv 2302.06675)."""
    not_negative(lr=lr, weight_decay=weight_decay)
    check_betas(betas)
    return made(lr, [_scale_by_lion(betas), *decay_links(weight_decay)])


def _rprop_steps(lr: float, etas: tuple[float, float], step_sizes: tuple[float, float]) -> Transform:
    """Return a transform that computes Rprop's update ``−size·sign(g)``, with a step size per element of each weight.

    The size is multiplied by ``η₊`` where g has the same sign as in the previous step. Where the sign has changed, it
    is multiplied by ``η₋``, and the weight stays unchanged in this step.
    """

    def init(op: Builder, params: Vars) -> Slots:
        sizes = [op.zeros_like(p) + lr for p in params]
        return {"prev": [op.zeros_like(p) for p in params], "step_size": sizes}

    def each(op: Builder, g: Var, p: Var, slots: Mapping[str, Var]) -> tuple[Var, Mapping[str, Var]]:
        agreement = op.Sign(g) * op.Sign(slots["prev"])  # a product of small gradients would underflow
        turned, kept = agreement < 0.0, agreement > 0.0
        factor = op.Where(turned, etas[0], op.Where(kept, op.const(etas[1], g.dtype), op.const(1.0, g.dtype)))
        size = op.Clip(slots["step_size"] * factor, *(op.const(limit, g.dtype) for limit in step_sizes))
        moving = op.Where(turned, op.const(0.0, g.dtype), g)
        return -(op.Sign(moving) * size), {"prev": moving, "step_size": size}

    arguments = {"lr": lr, "etas": list(etas), "step_sizes": list(step_sizes)}
    return parameterwise("rprop_steps", arguments, each, init)


@checked_recipe()
def rprop(
    lr: float = 1e-2,
    etas: tuple[float, float] = (0.5, 1.2),
    step_sizes: tuple[float, float] = (1e-6, 50.0),
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """Resilient propagation, for full batches, as ``torch.optim.Rprop``; ``lr`` is the initial step size."""
    not_negative(lr=lr)
    if not 0.0 < etas[0] < 1.0 < etas[1]:
        raise BuildError(f"etas must be a number in (0, 1) and one above 1, not {etas}")
    return made(lr, [_rprop_steps(lr, etas, step_sizes)], scaled=False)

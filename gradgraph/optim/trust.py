"""LARS and LAMB: updates proportional to the norm of each weight, for large batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.optim.adam_family import scale_by_adam
from gradgraph.optim.descent import momentum_links
from gradgraph.optim.modifiers import Rate, scale_by_learning_rate
from gradgraph.optim.recipe_parts import below_one, check_adam, checked_recipe, decay_links, made, not_negative
from gradgraph.optim.transform import Optimizer, Transform, parameterwise
from gradgraph.optim.weight_groups import Grouping

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["lamb", "lars", "scale_by_trust_ratio"]


def norm(op: Builder, x: Var) -> Var:
    """Return ‖x‖₂ as a scalar; in float32 if x is float16, whose largest finite value is 65,504."""
    wide = op.cast(x, ir.DataType.FLOAT) if x.dtype == ir.DataType.FLOAT16 else x
    return op.Sqrt(op.ReduceSumSquare(wide, keepdims=0))


def scale_by_trust_ratio() -> Transform:
    """Return a transform that multiplies by ``‖p‖/‖g‖`` for each weight, or by 1 if either norm is zero."""

    def each(op: Builder, g: Var, p: Var, slots: Mapping[str, Var]) -> tuple[Var, Mapping[str, Var]]:
        weight, step = norm(op, p), norm(op, g)
        usable = (weight > 0.0) & (step > 0.0)
        ratio = op.Where(usable, weight / op.Where(usable, step, 1.0), 1.0)
        return g * op.cast(ratio, g.dtype), {}

    return parameterwise("scale_by_trust_ratio", {}, each)


@checked_recipe()
def lamb(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """Adam's direction with decoupled decay, times ``‖p‖/‖direction‖`` (You et al., arXiv 1904.00962)."""
    check_adam(lr, betas, eps, weight_decay)
    links = [scale_by_adam(betas, eps), *decay_links(weight_decay), scale_by_trust_ratio()]
    return made(lr, links)


def _layer_rates(trust_coefficient: float, weight_decay: float, eps: float) -> Transform:
    """Return a transform that computes LARS's direction ``η‖p‖/(‖g‖ + λ‖p‖ + ε) · (g + λp)``.

    η is the trust coefficient, and λ the weight decay. The first factor is 1 where ‖p‖ or ‖g‖ is zero.
    """

    def each(op: Builder, g: Var, p: Var, slots: Mapping[str, Var]) -> tuple[Var, Mapping[str, Var]]:
        weight, slope = norm(op, p), norm(op, g)
        usable = (weight > 0.0) & (slope > 0.0)
        below = slope + weight_decay * weight + eps
        ratio = op.Where(usable, trust_coefficient * weight / op.Where(usable, below, 1.0), 1.0)
        decayed = g + weight_decay * p if weight_decay else g
        return decayed * op.cast(ratio, g.dtype), {}

    arguments = {"trust_coefficient": trust_coefficient, "weight_decay": weight_decay, "eps": eps}
    return parameterwise("layer_rates", arguments, each)


@checked_recipe()
def lars(
    lr: Rate = 1.0,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust_coefficient: float = 1e-3,
    eps: float = 1e-8,
    **grouping: Unpack[Grouping],
) -> Optimizer:
    """Momentum with a rate ``η‖p‖/(‖g‖ + λ‖p‖)`` for each layer (You et al., arXiv 1708.03888)."""
    not_negative(lr=lr, weight_decay=weight_decay, trust_coefficient=trust_coefficient, eps=eps)
    below_one(momentum=momentum)
    layer_rates = _layer_rates(trust_coefficient, weight_decay, eps)
    # the rate is applied before the momentum, as in the paper
    links = [layer_rates, scale_by_learning_rate(lr), *momentum_links(momentum)]
    return made(lr, links, scaled=False)

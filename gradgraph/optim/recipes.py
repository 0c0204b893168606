"""The optimizers people know, as chains: PyTorch's names, arguments, order and defaults."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gradgraph.arguments import FINITE, FLAG, NUMBER, checked
from gradgraph.errors import BuildError
from gradgraph.named import make_named
from gradgraph.optim.kinds import PAIR, RATE
from gradgraph.optim.modifiers import add_decayed_weights
from gradgraph.optim.scaling import momentum as momentum_of
from gradgraph.optim.scaling import scale_by_adam, scale_by_learning_rate, scale_by_rms
from gradgraph.optim.schedules import Schedule
from gradgraph.optim.transform import Optimizer, Transform

Rate = float | Schedule


@checked(lr=RATE, momentum=NUMBER, dampening=FINITE, weight_decay=NUMBER, nesterov=FLAG)
def sgd(
    lr: Rate = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
) -> Optimizer:
    """Stochastic gradient descent, as ``torch.optim.SGD``."""
    _not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise BuildError("Nesterov momentum needs a momentum above zero and no dampening")
    links = [*_decay(weight_decay), *([momentum_of(momentum, dampening, nesterov)] if momentum else [])]
    arguments = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
    return _recipe("sgd", lr, links, arguments)


@checked(lr=RATE, betas=PAIR, eps=NUMBER, weight_decay=NUMBER)
def adam(
    lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> Optimizer:
    """Adam with L2 regularisation, as ``torch.optim.Adam``."""
    _check_adam(lr, betas, eps, weight_decay)
    arguments = {"betas": list(betas), "eps": eps, "weight_decay": weight_decay}
    return _recipe("adam", lr, [*_decay(weight_decay), scale_by_adam(betas, eps)], arguments)


@checked(lr=RATE, betas=PAIR, eps=NUMBER, weight_decay=NUMBER)
def adamw(
    lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2
) -> Optimizer:
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``."""
    _check_adam(lr, betas, eps, weight_decay)
    arguments = {"betas": list(betas), "eps": eps, "weight_decay": weight_decay}
    return _recipe("adamw", lr, [scale_by_adam(betas, eps), *_decay(weight_decay)], arguments)


@checked(lr=RATE, alpha=NUMBER, eps=NUMBER, weight_decay=NUMBER, momentum=NUMBER, centered=FLAG)
def rmsprop(
    lr: Rate = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> Optimizer:
    """RMSprop, as ``torch.optim.RMSprop``."""
    _not_negative(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
    links = [*_decay(weight_decay), scale_by_rms(alpha, eps, centered), *([momentum_of(momentum)] if momentum else [])]
    arguments = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum, "centered": centered}
    return _recipe("rmsprop", lr, links, arguments)


RECIPES: dict[str, Callable[..., Optimizer]] = {"sgd": sgd, "adam": adam, "adamw": adamw, "rmsprop": rmsprop}


def by_name(name: str, **arguments: Any) -> Optimizer:
    """The recipe called ``name``.

    Raises:
        BuildError: there is no such recipe, or it has no such argument.
    """
    return make_named("optimizer", RECIPES, name, arguments)


def _recipe(name: str, lr: Rate, links: list[Transform], arguments: dict[str, Any]) -> Optimizer:
    rate = lr.describe() if isinstance(lr, Schedule) else lr
    return Optimizer(name, (*links, scale_by_learning_rate(lr)), {"lr": rate, **arguments})


def _decay(weight_decay: float) -> list[Transform]:
    return [add_decayed_weights(weight_decay)] if weight_decay else []


def _check_adam(lr: Rate, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    _not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    if len(betas) != 2 or not all(0.0 <= b < 1.0 for b in betas):
        raise BuildError(f"betas must be two numbers in [0, 1), not {betas}")


def _not_negative(**values: Rate) -> None:
    for name, value in values.items():
        if not isinstance(value, Schedule) and not 0.0 <= value < math.inf:
            raise BuildError(f"{name} must {'not be negative' if value < 0.0 else 'be finite'}, but is {value}")

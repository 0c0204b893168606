"""Shared parts of optimizer recipes: kinds of arguments, assembly of an optimizer, and checks of numbers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import ParamSpec

import onnx_ir as ir

from gradgraph.arguments import FLAG, NUMBER, TEXT, WHOLE, Kind, checked
from gradgraph.errors import BuildError
from gradgraph.optim.modifiers import Rate, add_decayed_weights, scale_by_learning_rate
from gradgraph.optim.schedules import Schedule
from gradgraph.optim.transform import Optimizer, Transform, Vars
from gradgraph.optim.weight_groups import recipe

P = ParamSpec("P")

RATE = Kind("a number, or a schedule such as gradgraph.optim.cosine(1e-3, 1000)",
            lambda value: isinstance(value, Schedule) or NUMBER.fits(value))  # fmt: skip
PAIR = Kind(
    "two numbers, such as (0.9, 0.999)",
    lambda value: isinstance(value, tuple | list) and len(value) == 2 and all(map(NUMBER.fits, value)),
)


_KINDS = {"Rate": RATE, "float": NUMBER, "int": WHOLE, "bool": FLAG, "str": TEXT, "tuple[float, float]": PAIR}


def checked_recipe(**kinds: Kind) -> Callable[[Callable[P, Optimizer]], Callable[P, Optimizer]]:
    """Decorate a recipe as ``recipe`` does, and check its arguments by ``kinds``, or else by their annotations."""

    def decorate(make: Callable[P, Optimizer]) -> Callable[P, Optimizer]:
        own = [p for p in inspect.signature(make).parameters.values() if p.kind is not p.VAR_KEYWORD]
        return recipe(checked(**{p.name: kinds.get(p.name) or _KINDS[p.annotation] for p in own})(make))

    return decorate


def made(lr: Rate, links: list[Transform], scaled: bool = True) -> Optimizer:
    """Return an optimizer without name and arguments, which ``recipe`` sets.

    Args:
        lr: the learning rate.
        links: its transforms.
        scaled: whether to multiply the result of ``links`` by ``−lr``.
    """
    return Optimizer("", (*links, *([scale_by_learning_rate(lr)] if scaled else [])))


def decay_links(weight_decay: float) -> list[Transform]:
    return [add_decayed_weights(weight_decay)] if weight_decay else []


def check_adam(lr: Rate, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    check_betas(betas)


def check_betas(betas: tuple[float, float]) -> None:
    if len(betas) != 2 or not all(0.0 <= b < 1.0 for b in betas):
        raise BuildError(f"betas must be two numbers in [0, 1), not {betas}")


def below_one(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= value < 1.0:
            raise BuildError(f"{name} must be in [0, 1), but is {value}")


def not_negative(**values: Rate) -> None:
    for name, value in values.items():
        if not isinstance(value, Schedule) and not 0.0 <= value < math.inf:
            raise BuildError(f"{name} must {'not be negative' if value < 0.0 else 'be finite'}, but is {value}")


def check_range(name: str, grads: Vars) -> None:
    """Raise BuildError for float16 gradients: g² and ε underflow in float16, so that g / (√v + ε) becomes infinite."""
    if any(g.dtype == ir.DataType.FLOAT16 for g in grads):
        raise BuildError(
            f"{name} squares gradients, and squares underflow for float16 weights",
            remedy=f"keep float32 copies with gradgraph.optim.master_weights({name}(...)), or use sgd",
            shell="keep float32 copies with --master-weights, or use --optimizer sgd",
        )

"""The optimizers people know, by name: the table that command line, help, errors and docs/names.md read.

``g`` gradient, ``p`` parameter, ``t`` the number of this step, counted from 1. Formulas, slot names, arguments and
defaults are those of ``torch.optim`` where it has the optimizer, so that trajectories can be compared. To add one,
write its mathematics and its recipe into a file of this folder, name the recipe in ``RECIPES``, and add its cases to
``tests/optim_cases.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradgraph.named import make_named
from gradgraph.optim.adafactor import adafactor
from gradgraph.optim.adam import adam, adamw, scale_by_adam
from gradgraph.optim.adam_variants import adamax, nadam, radam
from gradgraph.optim.descent import lion, momentum, rprop, sgd
from gradgraph.optim.muon import muon
from gradgraph.optim.rms import adadelta, adagrad, rmsprop, scale_by_rms
from gradgraph.optim.transform import Optimizer
from gradgraph.optim.trust import lamb, lars, scale_by_trust_ratio

__all__ = [
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "by_name", "lamb", "lars", "lion", "momentum",
    "muon", "nadam", "radam", "rmsprop", "rprop", "scale_by_adam", "scale_by_rms", "scale_by_trust_ratio", "sgd",
]  # fmt: skip

RECIPES: dict[str, Callable[..., Optimizer]] = {
    f.__name__: f
    for f in (
        sgd, adam, adamw, nadam, radam, adamax, rmsprop, adagrad, adadelta, rprop, lion, lars, lamb, adafactor, muon,
    )
}  # fmt: skip


def by_name(name: str, **arguments: Any) -> Optimizer:
    """The recipe called ``name``.

    Raises:
        BuildError: there is no such recipe, or it has no such argument.
    """
    return make_named("optimizer", RECIPES, name, arguments)

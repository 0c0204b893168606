"""The optimizers people know, by name: the table that command line, help, errors and pages read.

``g`` gradient, ``p`` parameter, ``t`` the number of this step, counted from 1. Formulas, slot names, arguments and
defaults are those of ``torch.optim`` where it has the optimizer, so that trajectories can be compared. To add one,
write its mathematics and its recipe into the file of its family, name it in ``__all__`` there, and add its cases to
``tests/optim_cases.py``. A new family is one more file of this folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradgraph.arguments import make_named
from gradgraph.optim import (
    adam_family,
    adam_variants,
    descent,
    factored,
    orthogonal,
    quasi_newton,
    rms,
    schedule_free,
    trust,
)
from gradgraph.optim.transform import Optimizer
from gradgraph.optim.weight_groups import MADE

__all__ = ["by_name"]

FAMILIES = (descent, adam_family, adam_variants, rms, trust, factored, orthogonal, schedule_free, quasi_newton)
RECIPES: dict[str, Callable[..., Optimizer]] = {
    name: make for family in FAMILIES for name, make in MADE.items() if make.__module__ == family.__name__
}


def by_name(name: str, **arguments: Any) -> Optimizer:
    """The recipe called ``name``.

    Raises:
        BuildError: there is no such recipe, or it has no such argument.
    """
    return make_named("optimizer", RECIPES, name, arguments)

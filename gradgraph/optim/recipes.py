"""The table of optimizers by name, used by the command line, help, errors and documentation.

In formulas, ``g`` is the gradient, ``p`` the parameter, and ``t`` the number of this step, counted from 1. Formulas,
slot names, arguments and defaults follow ``torch.optim`` where it has the optimizer, so that trajectories can be
compared. To add an optimizer, write its mathematics and its recipe into the file of its family, list it in ``__all__``
there, and add its cases to ``tests/kit/optim_cases.py``. For a new family, add a file to this folder, to ``FAMILIES``
and to ``__init__.py``.
"""

from __future__ import annotations

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
from gradgraph.optim.weight_groups import RECIPES as RECIPES

__all__ = ["by_name"]

FAMILIES = (descent, adam_family, adam_variants, rms, trust, factored, orthogonal, schedule_free, quasi_newton)
RECIPES.order(name for f in FAMILIES for name, make in RECIPES.items() if make.__module__ == f.__name__)
by_name = RECIPES.by_name

"""Losses by name.

Names, arguments and defaults are those of ``torch.nn.functional``. An additional argument, ``axis``, is the class axis
(default 1), so that models with classes on the last axis need no transpose. The losses are defined in
``gradgraph/frontend/losses_*.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gradgraph.frontend import functional
from gradgraph.frontend.loss import LOSSES, REMEDIES, Loss
from gradgraph.frontend.losses_classes import class_axis

__all__ = ["LOSSES", "REMEDIES", "Loss", "by_name", "class_axis"]
assert functional  # importing it registers the losses

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Loss]: ...

else:

    def __getattr__(name: str) -> Callable[..., Loss]:
        try:
            return LOSSES[name]
        except KeyError:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'{LOSSES.hint(name)}") from None


def __dir__() -> list[str]:
    return sorted([*__all__, *LOSSES])


by_name = LOSSES.by_name

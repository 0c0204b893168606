"""The options of a step: what it minimises, what it trains, and by which optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradgraph.arguments import FLAG, NAMES, NUMBER, TEXT, WHOLE, Kind, instance
from gradgraph.autodiff.recomputation import KEEP, Keep
from gradgraph.building.loss_function import LossFunction
from gradgraph.building.weighted_losses import MaskSpec
from gradgraph.errors import BuildError
from gradgraph.frontend.lowering import Spec
from gradgraph.losses import Loss
from gradgraph.optim import Optimizer

_MASK = Kind(
    "True, a shape, or a dict of these or of numbers of axes by output, such as {'boxes': 2}",
    lambda value: (
        all(isinstance(k, str) and (WHOLE.fits(v) or _is_mask(v)) for k, v in value.items())
        if isinstance(value, Mapping)
        else _is_mask(value)
    ),
)


def _is_mask(value: Any) -> bool:
    return value is None or isinstance(value, bool) or (isinstance(value, Sequence) and not isinstance(value, str))


_KINDS = {
    "mask": _MASK,
    "train": NAMES,
    "freeze": NAMES,
    "freeze_below": NAMES,
    "output": NAMES.or_none(),
    "target_name": TEXT,
    "targets": instance(Mapping, "a dict of names and shapes, such as {'target': ('batch', 4)}"),
    "seed": WHOLE.or_none(),
    "ema": NUMBER.or_none(),
    "accumulate": FLAG,
    "grad_norm": FLAG,
    "recompute": KEEP,
}


@dataclass(frozen=True)
class StepOptions:
    """One of several named steps over one state: ``gradgraph.build(model, steps={"name": StepOptions(...), ...})``.

    The arguments are those of ``gradgraph.build``.

    Args:
        seed: of what this step draws; by default each step gets one of its own from that of ``gradgraph.build``.

    Raises:
        ArgumentError: an argument is of the wrong kind.
    """

    loss: str | Loss | LossFunction | Mapping[Any, Any] | None = "cross_entropy"
    optimizer: str | Optimizer = "adamw"
    train: str | Sequence[str] = field(default="*", kw_only=True)
    freeze: str | Sequence[str] = field(default=(), kw_only=True)
    freeze_below: str | Sequence[str] = field(default=(), kw_only=True)
    output: str | Sequence[str] | None = field(default=None, kw_only=True)
    target_name: str = field(default="target", kw_only=True)
    targets: Mapping[str, Spec] = field(default_factory=dict, kw_only=True)
    sample_weight: bool | Sequence[int | str | None] = field(default=False, kw_only=True)
    mask: MaskSpec = field(default=False, kw_only=True)
    metrics: Any = field(default=None, kw_only=True)
    seed: int | None = field(default=None, kw_only=True)
    ema: float | None = field(default=None, kw_only=True)
    accumulate: bool = field(default=False, kw_only=True)
    grad_norm: bool = field(default=False, kw_only=True)
    recompute: Keep = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            kind.check(name, getattr(self, name))
        if not self.target_name:
            raise BuildError(
                "the input that the loss compares with needs a name",
                remedy="pass one, such as target_name='target'",
                shell="give one, such as --target-name target",
            )


STEPS = Kind(
    "a dict of names and options, such as {'generator': gradgraph.StepOptions(loss, optimizer)}",
    lambda value: isinstance(value, Mapping) and all(isinstance(o, StepOptions) for o in value.values()),
)


def check_names(steps: Mapping[str, StepOptions]) -> None:
    """Raise BuildError unless each name can be that of a column and of a file."""
    if not steps:
        raise BuildError("steps is empty; name at least one, or leave steps out")
    seen = dict[str, str]()
    for name in steps:
        if not (isinstance(name, str) and name.isidentifier() and name.isascii()):
            raise BuildError(
                f"a step is called {name!r}; a name begins with a letter and has only letters, digits and underscores"
            )
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise BuildError(f"two steps are called '{other}' and '{name}', which are one file on some systems")

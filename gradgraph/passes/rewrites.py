"""Run a list of passes over a whole model; each entry states the reason for its place in the order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import onnx_ir as ir

Apply = Callable[[ir.Model], object]


@dataclass(frozen=True)
class Rewrite:
    """A pass over the whole graph, with its reason.

    Attributes:
        apply: changes a model in place, or raises an error.
        reason: why it runs at this place, in one sentence.
        then: passes that run next if ``apply`` returns True (it changed something).
    """

    apply: Apply
    reason: str
    then: tuple[Apply, ...] = ()


def run(rewrites: Iterable[Rewrite], model: ir.Model) -> list[Apply]:
    """Apply ``rewrites`` to ``model`` in order; return the passes that changed something."""
    changed = []
    for rewrite in rewrites:
        if rewrite.apply(model):
            changed.append(rewrite.apply)
            for follower in rewrite.then:
                follower(model)
    return changed

"""Passes over a whole model as data: a list of them is an order that a reader sees on one screen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import onnx_ir as ir

Apply = Callable[[ir.Model], object]


@dataclass(frozen=True)
class Rewrite:
    """A pass over the whole graph, and what it is for.

    Attributes:
        apply: changes a model in place, or refuses it.
        reason: why it stands where it stands, in one sentence.
        then: passes that follow where ``apply`` returns True: it changed something.
    """

    apply: Apply
    reason: str
    then: tuple[Apply, ...] = ()


def run(rewrites: Iterable[Rewrite], model: ir.Model) -> list[Apply]:
    """Apply ``rewrites`` to ``model`` in their order; return the passes that said that they changed something."""
    changed = []
    for rewrite in rewrites:
        if rewrite.apply(model):
            changed.append(rewrite.apply)
            for follower in rewrite.then:
                follower(model)
    return changed

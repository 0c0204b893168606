"""Notes on the weights that globs match: ``train 'head.*' matches 4 tensors, 1,234 numbers: 'head.weight', …``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from gradgraph.arguments import as_names, matching
from gradgraph.autodiff.path import carries
from gradgraph.autodiff.select import running_statistics
from gradgraph.building.draft import Draft, Part
from gradgraph.errors import listed, shown
from gradgraph.graph.marks import is_marked_constant

_NAMED = 6  # weights listed


def matches_of_globs(draft: Draft) -> list[str]:
    """Return a line for each glob in the options of each part, with the weights that it matches.

    Options without wildcards are skipped, and so is ``*`` in all options except pruning.
    """
    return [line for part in draft.parts for line in _of_part(part)]


def _of_part(part: Part) -> Iterator[str]:
    graph, own, groups = part.model.graph, part.options, part.optimizer.groups
    statistics = running_statistics(graph)
    weights = {
        n: v for n, v in graph.initializers.items() if carries(v) and not is_marked_constant(v) and v not in statistics
    }
    trained = {n: weights[n] for n in part.trained if n in weights}
    of = f" of '{part.name}'" if part.name else ""
    yield from _lines(f"train{of}", as_names(own.train), weights)
    yield from _lines(f"freeze{of}", as_names(own.freeze), weights)
    if groups is not None:
        yield from _lines(f"groups{of}", groups.globs, trained)
        yield from _lines(f"no_decay{of}", groups.no_decay, trained)
    if (pruning := part.optimizer.pruning) is not None:
        params = [graph.initializers[n] for n in part.trained if n in graph.initializers]
        for pattern in pruning.target:  # including *, as it skips vectors
            yield from _line(f"pruning{of}", pattern, [params[i] for i in pruning.matched(pattern, params)])


def _lines(what: str, patterns: Iterable[str], weights: Mapping[str, ir.Value]) -> Iterator[str]:
    for pattern in patterns:
        if pattern != "*":
            yield from _line(what, pattern, [weights[name] for name in matching(pattern, list(weights))])


def _line(what: str, pattern: str, found: Sequence[ir.Value]) -> Iterator[str]:
    names = [value.name or "" for value in found]
    if found and names != [pattern]:
        count = "1 tensor" if len(found) == 1 else f"{len(found)} tensors"
        size = sum(v.const_value.size for v in found if v.const_value is not None)
        yield f"{what} '{shown(pattern)}' matches {count}, {size:,} numbers: {listed(names, _NAMED)}"

"""The selection of weights: a step trains some, and the others stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.autodiff.path import carries
from gradgraph.autodiff.review import left_out
from gradgraph.autodiff.select import running_statistics, trainable
from gradgraph.errors import BuildError, UnknownNameError, shown, suggestion
from gradgraph.marks import is_marked_constant
from gradgraph.named import as_names, matching


def parameters(
    graph: ir.Graph, read: Sequence[ir.Value], train: str | Sequence[str], freeze: str | Sequence[str]
) -> list[str]:
    """Names of the initializers to train, in the model's order, for a loss that reads these values."""
    usual = [v.name for v in trainable(graph, read) if v.name]
    statistics = {v.name for v in running_statistics(graph)}
    weights = [
        n for n, v in graph.initializers.items() if carries(v) and not is_marked_constant(v) and n not in statistics
    ]
    selected: set[str] = set()
    for pattern in as_names(train):
        found = usual if pattern == "*" else matching(pattern, weights)
        if pattern in statistics:
            raise BuildError(f"'{shown(pattern)}' is a running statistic or a buffer, which is never trained")
        if not found and pattern != "*":
            raise UnknownNameError(
                f"'{shown(pattern)}', which is to be trained, matches no weight of the model"
                f"{suggestion(pattern, weights)}"
            )
        selected.update(found)
    for pattern in as_names(freeze):
        found = matching(pattern, weights)
        if not found:
            raise UnknownNameError(
                f"'{shown(pattern)}', which is to be frozen, matches no weight of the model"
                f"{suggestion(pattern, weights)}"
            )
        selected.difference_update(found)
    if not selected:
        others = left_out(graph, read, ()) if is_default(train, freeze) else ""
        raise BuildError(
            "nothing is left to train: no floating initializer on the way to the loss is selected and not frozen"
            + (f"; left out: {others}" if others else ""),
            **_hint_at_constants(graph),
        )
    _check_precision(graph, selected)
    return [n for n in weights if n in selected]


def is_default(train: str | Sequence[str], freeze: str | Sequence[str]) -> bool:
    """Has nobody chosen what is trained?"""
    return as_names(train) == ["*"] and not as_names(freeze)


def _hint_at_constants(graph: ir.Graph) -> dict[str, Any]:
    """Some tools write all numbers as Constant nodes, weights as well."""
    constants = (
        n for n, v in graph.initializers.items() if is_marked_constant(v) and carries(v) and len(v.shape or ()) > 1
    )
    name = next(constants, None)
    if name is None:
        return {}
    would = "would train that constant"
    return {"remedy": f"train='{shown(name)}' {would}", "shell": f"--train '{shown(name)}' {would}"}


def _check_precision(graph: ir.Graph, names: Iterable[str]) -> None:
    short = [n for n in names if graph.initializers[n].dtype == ir.DataType.BFLOAT16]
    if short:
        raise BuildError(
            f"'{shown(min(short))}' holds bfloat16 numbers, in which small updates round to nothing and runtimes have "
            "no arithmetic; store the weights in float32 to train them"
        )


def frozen_values(graph: ir.Graph, trained: Sequence[str]) -> set[ir.Value]:
    """Weights that stay as they are. Constants are none: a layer without affine parameters has nothing to freeze."""
    kept = set(trained)
    return {v for n, v in graph.initializers.items() if n not in kept and not is_marked_constant(v)}


def as_input(graph: ir.Graph, name: str) -> ir.Value:
    """Turn an initializer into a required input (a default value would be ignored silently by some runtimes)."""
    value = graph.initializers.pop(name)
    value.const_value = None
    graph.inputs.append(value)
    return value

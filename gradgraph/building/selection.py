"""The selection of weights: a step trains some, and the others stay as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.arguments import as_names, matching
from gradgraph.autodiff.path import carries
from gradgraph.autodiff.review import left_out
from gradgraph.autodiff.select import running_statistics, trainable
from gradgraph.errors import BuildError, UnknownNameError, shown, suggestion
from gradgraph.graph.checks import subgraphs
from gradgraph.graph.marks import TEACHER, TEACHERS, adapter_weights, is_marked_constant
from gradgraph.graph.prune import needed
from gradgraph.passes.normal.edit import value_named


def parameters(
    graph: ir.Graph,
    read: Sequence[ir.Value],
    train: str | Sequence[str],
    freeze: str | Sequence[str],
    below: Collection[str] = (),
    apart: str = "",
) -> list[str]:
    """Names of the initializers to train, in the model's order, for a loss that reads these values.

    Args:
        train, freeze: names and globs.
        below: names of others that are frozen; the graph need not have all of them any more.
        apart: what the names begin with of those that are not there to choose: a teacher's.
    """
    usual = [v.name for v in trainable(graph, read) if v.name]
    statistics = {v.name for v in running_statistics(graph)}
    weights = [
        n for n, v in graph.initializers.items() if carries(v) and not is_marked_constant(v) and n not in statistics
    ]
    if apart:
        weights = [n for n in weights if not n.startswith(apart)]
        usual = [n for n in usual if not n.startswith(apart)]
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
    selected.difference_update(below)
    if not selected:
        others = left_out(graph, read, ()) if is_default(train, (*as_names(freeze), *below)) else ""
        raise BuildError(
            "nothing is left to train: no floating initializer on the way to the loss is selected and not frozen"
            + (f"; left out: {others}" if others else ""),
            **_hint_at_constants(graph),
        )
    _check_precision(graph, selected)
    return [n for n in weights if n in selected]


def parameters_of(
    model: ir.Model,
    read: Sequence[ir.Value],
    train: str | Sequence[str],
    freeze: str | Sequence[str],
    below: Collection[str] = (),
) -> list[str]:
    """As :func:`parameters`, of a model that says of itself what is trained by default: its adapters, no teacher."""
    adapters = adapter_weights(model.metadata_props)
    if adapters and as_names(train) == ["*"]:
        train = adapters  # what else there is stays frozen, as it is stored
    apart = TEACHERS if TEACHER in model.metadata_props else ""
    return parameters(model.graph, read, train, freeze, below, apart)


def frozen_below(model: ir.Model, values: str | Sequence[str]) -> list[str]:
    """The weights that are frozen for the values that they make, of a model as it was read.

    Raises:
        UnknownNameError: the model has no such value.
        BuildError: a value is computed from no weight.
    """
    found = {value: weights_below(model, value) for value in as_names(values)}
    for value, names in found.items():
        if not names:
            raise BuildError(f"'{shown(value)}', below which weights are to be frozen, is computed from none")
    return [name for names in found.values() for name in names]


def weights_below(model: ir.Model, value: str) -> list[str]:
    """The names of all initializers that ``value`` is computed from, in the model's order: floating tensors of more
    than one number.

    Raises:
        UnknownNameError: the model has no such value.
    """
    found = value_named(model, value)
    _, read = needed(model.graph, [found], lambda node: node.outputs, _read)
    read.add(found)
    return [name for name, v in model.graph.initializers.items() if v in read and _is_weight(v)]


def _read(node: ir.Node) -> list[ir.Value]:
    """What a node reads, its bodies too."""
    inner = (v for body in subgraphs(node) for n in body.all_nodes() for v in n.inputs)
    return [v for v in (*node.inputs, *inner) if v is not None]


def _is_weight(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.dtype.is_floating_point() and tensor.size > 1


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

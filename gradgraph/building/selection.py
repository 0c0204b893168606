"""Selection of the weights to train; all other weights are frozen."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.arguments import as_names, matching
from gradgraph.autodiff.path import carries
from gradgraph.autodiff.review import left_out
from gradgraph.autodiff.select import running_statistics, trainable
from gradgraph.errors import BuildError, Remedies, UnknownNameError, shown, suggestion
from gradgraph.files.model_metadata import adapter_weights
from gradgraph.graph.checks import subgraphs
from gradgraph.graph.marks import TEACHER, TEACHERS, is_marked_constant
from gradgraph.graph.prune import needed
from gradgraph.passes.normal.edit import value_named


def parameters_of(
    model: ir.Model,
    read: Sequence[ir.Value],
    train: str | Sequence[str],
    freeze: str | Sequence[str],
    below: Collection[str] = (),
) -> list[str]:
    """Return the names of the initializers to train, in the model's order.

    If the model has adapters, only their weights are trained by default. Weights of a teacher are never trained.

    Args:
        read: the values that the loss reads.
        train, freeze: names and globs of weights.
        below: names of further weights to freeze; some may no longer be in the graph.
    """
    graph, adapters = model.graph, adapter_weights(model.metadata_props)
    if adapters and as_names(train) == ["*"]:
        train = adapters  # everything else stays frozen, as stored
    usual = [v.name for v in trainable(graph, read) if v.name]
    statistics = {v.name for v in running_statistics(graph)}
    weights = [
        n for n, v in graph.initializers.items() if carries(v) and not is_marked_constant(v) and n not in statistics
    ]
    if TEACHER in model.metadata_props:
        weights = [n for n in weights if not n.startswith(TEACHERS)]
        usual = [n for n in usual if not n.startswith(TEACHERS)]
    selected: set[str] = set()
    for pattern in as_names(train):
        found = usual if pattern == "*" else matching(pattern, weights)
        if pattern in statistics:
            raise BuildError(
                f"'{shown(pattern)}' is a running statistic or a buffer, which is never trained; remove it from train"
            )
        if not found and pattern != "*":
            raise UnknownNameError(
                f"'{shown(pattern)}' in train matches no weight of the model{suggestion(pattern, weights)}"
            )
        selected.update(found)
    for pattern in as_names(freeze):
        found = matching(pattern, weights)
        if not found:
            raise UnknownNameError(
                f"'{shown(pattern)}' in freeze matches no weight of the model{suggestion(pattern, weights)}"
            )
        selected.difference_update(found)
    selected.difference_update(below)
    if not selected:
        others = left_out(graph, read, ()) if is_default(train, (*as_names(freeze), *below)) else ""
        raise BuildError(
            "no parameters to train: no floating-point initializer on the way to the loss is selected and not frozen"
            + (f"; excluded: {others}" if others else ""),
            **(_hint_at_constants(graph) or _hint_at_integers(graph)),
        )
    if short := [n for n in selected if graph.initializers[n].dtype == ir.DataType.BFLOAT16]:
        raise BuildError(
            f"'{shown(min(short))}' is bfloat16, whose precision is too low for small updates and which runtimes do "
            "not support; store the weights in float32 to train them"
        )
    return [n for n in weights if n in selected]


def frozen_below(model: ir.Model, values: str | Sequence[str]) -> list[str]:
    """Return the names of the weights upstream of ``values``, for ``freeze_below``; no pass may have changed ``model``.

    Raises:
        UnknownNameError: if the model has no value of a given name.
        BuildError: if a value does not depend on any weight.
    """
    found = {value: weights_below(model, value) for value in as_names(values)}
    for value, names in found.items():
        if not names:
            raise BuildError(
                f"'{shown(value)}' in freeze_below does not depend on any weight; name a value downstream of weights"
            )
    return [name for names in found.values() for name in names]


def weights_below(model: ir.Model, value: str) -> list[str]:
    """Return the names of the weights that ``value`` depends on, in the model's order.

    These are floating-point initializers with more than one element.

    Raises:
        UnknownNameError: if the model has no value of that name.
    """
    found = value_named(model, value)

    def read_by(node: ir.Node) -> list[ir.Value]:
        inner = (v for body in subgraphs(node) for n in body.all_nodes() for v in n.inputs)
        return [v for v in (*node.inputs, *inner) if v is not None]

    _, read = needed(model.graph, [found], lambda node: node.outputs, read_by)
    tensors = {name: v.const_value for name, v in model.graph.initializers.items() if v in read or v is found}
    return [name for name, t in tensors.items() if t is not None and t.dtype.is_floating_point() and t.size > 1]


def how_to_freeze(names: Sequence[str]) -> Remedies:
    """Return a remedy for an error message: how to freeze these weights, in Python and on the command line."""
    these = names[0] if len(names) == 1 else list(names)
    typed = " ".join(f"--freeze {shlex.quote(shown(name))}" for name in names)
    it = "them" if names[1:] else "it"
    return {
        "remedy": f"remove {it} from train, or pass freeze={these!r}",
        "shell": f"remove {it} from --train, or add {typed}",
    }


def is_default(train: str | Sequence[str], freeze: str | Sequence[str]) -> bool:
    """Whether ``train`` and ``freeze`` have their defaults."""
    return as_names(train) == ["*"] and not as_names(freeze)


def _hint_at_constants(graph: ir.Graph) -> dict[str, Any]:
    """Return a remedy if weights seem to be stored in Constant nodes, as some tools do; empty otherwise."""
    constants = (
        n for n, v in graph.initializers.items() if is_marked_constant(v) and carries(v) and len(v.shape or ()) > 1
    )
    name = next(constants, None)
    if name is None:
        return {}
    would = "would train that constant"
    return {"remedy": f"train='{shown(name)}' {would}", "shell": f"--train '{shown(name)}' {would}"}


def _hint_at_integers(graph: ir.Graph) -> dict[str, Any]:
    """Return a remedy for a quantised model, whose weights have no gradient without a straight-through estimator."""
    if not any(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in graph):
        return {}
    return {
        "remedy": "gg.qat(model) makes quantised weights trainable, and gg.lora(model, target='*') adds adapters",
        "shell": "gradgraph surgery MODEL --qat-quantised makes quantised weights trainable, and --lora '*' adds "
        "adapters",
    }


def frozen_values(graph: ir.Graph, trained: Sequence[str]) -> set[ir.Value]:
    """Return the frozen weights: initializers that are not trained, except those marked as constants."""
    kept = set(trained)
    return {v for n, v in graph.initializers.items() if n not in kept and not is_marked_constant(v)}


def as_input(graph: ir.Graph, name: str) -> ir.Value:
    """Turn an initializer into an input without a default, because some runtimes ignore values fed for initializers."""
    value = graph.initializers.pop(name)
    value.const_value = None
    graph.inputs.append(value)
    return value

"""Extraction of a part of a model, and the names of the weights that a value is computed from."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gradgraph.arguments import NAMES, PATH, TEXT, as_names, checked
from gradgraph.building.selection import weights_below
from gradgraph.errors import ModelError, shown
from gradgraph.files.models import Source, load_model
from gradgraph.graph.prune import prune
from gradgraph.surgery.operation import Path, Result, closed, opened, value_named


@checked(inputs=NAMES.or_none(), outputs=NAMES.or_none(), out=PATH.or_none())
def cut(
    model: Source,
    *,
    inputs: str | Sequence[str] | None = None,
    outputs: str | Sequence[str] | None = None,
    out: Path | None = None,
) -> Result:
    """Extract the part of the model from ``inputs`` to ``outputs``; inner values keep their names as inputs or outputs.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        inputs: values to feed instead of computing them; by default the model's inputs. Other inputs stay if used.
        outputs: values to return, in this order; by default the model's outputs.
        out: write the result to this path.

    Returns:
        A model of the same type as ``model`` (a ``ModelProto`` for a path; with ``out``, an ``onnx_ir.Model``), without
        nodes, weights and inputs that the outputs do not need.

    Raises:
        UnknownNameError: the model has no such value.
        ModelError: a value to feed has an unknown type, or is a weight.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    if outputs is not None:
        work.graph.outputs[:] = [_returned(work, name) for name in as_names(outputs)]
    for name in as_names(inputs or ()):
        _feed(work, value_named(work, name))
    prune(work)
    for value in list(work.graph.inputs):
        if not value.uses() and not value.is_graph_output():
            work.graph.inputs.remove(value)
            work.graph.initializers.pop(value.name or "", None)
    return closed(work, model, out)


def _returned(work: ir.Model, name: str) -> ir.Value:
    value = value_named(work, name)
    if value.is_initializer() or value.is_graph_input():
        raise ModelError(f"'{shown(name)}' is an input or a weight of the model; an output must be computed")
    return value


def _feed(work: ir.Model, value: ir.Value) -> None:
    if value.is_graph_input():
        return
    if value.is_initializer():
        raise ModelError(f"'{shown(value.name)}' is a weight; an inner value or an input can be fed")
    if value.type is None:
        raise ModelError(f"the type of '{shown(value.name)}' is unknown, so it cannot be an input; cut elsewhere")
    fed = ir.Value(name=value.name, type=value.type, shape=value.shape, doc_string=value.doc_string)
    if value.is_graph_output():
        raise ModelError(f"'{shown(value.name)}' is both an input and an output of the cut; remove it from one of them")
    value.replace_all_uses_with(fed)
    value.name = None
    work.graph.inputs.append(fed)


@checked(value=TEXT)
def below(model: Source, value: str) -> list[str]:
    """Return the names of all weights that ``value`` is computed from, in the model's order.

    ``gg.build(model, freeze_below="features")`` trains all other weights. Weights are floating-point initializers with
    more than one element, unlike the target shape of a Reshape.

    Raises:
        UnknownNameError: the model has no such value.
    """
    return weights_below(load_model(model), value)

"""Adding preprocessing and class names to an inference model, so that it accepts the columns of a table."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.autodiff.probabilities import probabilities
from gradgraph.data.preprocess.column_nodes import call_classes, put_before
from gradgraph.data.record.data_names import DataNames
from gradgraph.graph.shape_inference import shape_of
from gradgraph.runtime.execution.scores import scores_of


def serve(model: ir.Model, names: DataNames, own_outputs: bool) -> None:
    """Prepend the preprocessing of the training data, if any, to a model, in place; columns become its inputs.

    If the model has all its outputs (``own_outputs``), class names and probabilities are added as outputs.
    """
    plan = names.preprocess
    inputs = {value.name for value in model.graph.inputs}
    if plan is None or inputs.isdisjoint(plan.features):
        return
    put_before(model, plan)
    if own_outputs:
        call_classes(model, _scores(model, names))


def _scores(model: ir.Model, names: DataNames) -> dict[str, tuple[tuple[str, ...], str]]:
    """Return the class names and ``Scores.computed`` of each output with class scores, by name."""
    shapes = {v.name or "": shape_of(v) or () for v in model.graph.outputs}
    probable = [v.name or "" for v in model.graph.outputs if probabilities(v) is not None]
    return {one.output: (one.classes, one.computed) for one in scores_of(names, shapes, probable)}

"""The model as it is served: with its preprocessing in front, and classes called by their names."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.autodiff.probabilities import probabilities
from gradgraph.graph.shapes import shape_of
from gradgraph.preprocess.column_nodes import call_classes, put_before
from gradgraph.runtime.execution.scores import scores_of
from gradgraph.step.data_names import DataNames


def serve(model: ir.Model, names: DataNames, own_outputs: bool) -> None:
    """Let a model, in place, take the columns of a table, if its data were preprocessed.

    Args:
        model: an inference model.
        names: of the data that it was trained on.
        own_outputs: it has all its outputs, so others may come to them: the classes by name, and their probabilities.
    """
    plan = names.preprocess
    inputs = {value.name for value in model.graph.inputs}
    if plan is None or inputs.isdisjoint(plan.features):
        return
    put_before(model, plan)
    if own_outputs:
        call_classes(model, _scores(model, names))


def _scores(model: ir.Model, names: DataNames) -> dict[str, tuple[tuple[str, ...], str]]:
    """The outputs with scores for classes: the names of the classes, and what makes probabilities of the scores."""
    shapes = {v.name or "": shape_of(v) or () for v in model.graph.outputs}
    probable = [v.name or "" for v in model.graph.outputs if probabilities(v) is not None]
    return {one.output: (one.classes, one.computed) for one in scores_of(names, shapes, probable)}

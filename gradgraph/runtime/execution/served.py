"""The model as it is served: with its preprocessing in front, and classes called by their names."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.autodiff.probabilities import probabilities
from gradgraph.graph.shapes import shape_of
from gradgraph.preprocess.column_nodes import call_classes, put_before
from gradgraph.runtime.execution.scores import output_of
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


def _scores(model: ir.Model, names: DataNames) -> dict[str, tuple[tuple[str, ...], bool, bool]]:
    """The outputs with a score for each class: the names of the classes, whether probabilities are the Softmax of the
    scores, and whether the scores are probabilities.
    """
    found = {}
    for target, classes in names.classes.items():
        shapes = {v.name or "": shape_of(v) or () for v in model.graph.outputs}
        output = output_of(target, [name for name, shape in shapes.items() if shape[1:] == (len(classes),)])
        if output is not None:
            value = next(v for v in model.graph.outputs if v.name == output)
            is_softmax = probabilities(value) is not None
            found[output] = (tuple(classes), target in names.softmax and not is_softmax, is_softmax)
    return found

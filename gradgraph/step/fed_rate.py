"""A step whose learning rate follows a schedule in the graph, as one that is fed it: to try rates on it."""

from __future__ import annotations

from dataclasses import replace

import onnx
from onnx import TensorProto, helper

from gradgraph.errors import BuildError
from gradgraph.files.protos import reads
from gradgraph.step.manifest import LEARNING_RATE, UPDATE, column
from gradgraph.step.step import Step

DEFAULT = 1e-3  # what it is fed where nobody says otherwise


def with_fed_rate(step: Step, name: str = "") -> Step:
    """A copy of ``step`` with the input ``learning_rate`` in place of the output of this name.

    Args:
        name: of several steps, which one.

    Raises:
        BuildError: the rate is no output (an older gradgraph has written the step), a constant of the graph, or part of
            an update that waits for several batches.
    """
    rate, part = column(name, LEARNING_RATE), step.manifest.parts[name]
    model = onnx.ModelProto()
    model.CopyFrom(step.trains[name])
    makers = [node for node in model.graph.node if list(node.output) == [rate]]
    used = any(rate in reads(node) for node in model.graph.node)
    if rate not in part.reports or not makers or not used or UPDATE in part.hyperparameters:
        raise BuildError(
            "the learning rate is part of the graph, where nothing else can be fed in its place",
            remedy="build the step with a number, such as adamw(1e-3), to find one",
            shell="leave --schedule out, or build the step without one",
        )
    model.graph.node.remove(makers[0])
    model.graph.output.remove(next(o for o in model.graph.output if o.name == rate))
    model.graph.input.append(helper.make_tensor_value_info(LEARNING_RATE, TensorProto.FLOAT, []))
    if rate != LEARNING_RATE:
        model.graph.node.insert(0, helper.make_node("Identity", [LEARNING_RATE], [rate]))
    reports = tuple(r for r in part.reports if r != rate)
    fed = {**part.hyperparameters, LEARNING_RATE: DEFAULT}
    if not name:
        manifest = replace(step.manifest, separate=None, reports=reports, hyperparameters=fed)
        return replace(step, train=model, separate={}, manifest=manifest)
    steps = {**step.manifest.steps, name: replace(step.manifest.steps[name], reports=reports, hyperparameters=fed)}
    trains = {**step.trains, name: model}
    return replace(step, train=trains, manifest=replace(step.manifest, steps=steps))

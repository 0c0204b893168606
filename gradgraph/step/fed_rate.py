"""A step with a fed learning rate in place of its schedule in the graph, for trying out rates."""

from __future__ import annotations

from dataclasses import replace

import onnx
from onnx import TensorProto, helper

from gradgraph.errors import BuildError
from gradgraph.files.protos import reads
from gradgraph.step.manifest import LEARNING_RATE, column
from gradgraph.step.step import Step

DEFAULT = 1e-3  # its default when fed


def with_fed_rate(step: Step, name: str = "") -> Step:
    """Return a copy of ``step`` with the input ``learning_rate`` in place of the output of this name.

    Args:
        name: which of several steps.

    Raises:
        BuildError: the optimizer has no learning rate; no weight follows it; or the rate is not an output (the step was
            written by an older gradgraph).
    """
    rate, part = column(name, LEARNING_RATE), step.manifest.parts[name]
    model = onnx.ModelProto()
    model.CopyFrom(step.trains[name])
    makers = [node for node in model.graph.node if list(node.output) == [rate]]
    if rate not in part.reports or not makers:
        raise BuildError(
            "this step cannot be fed a learning rate: its optimizer has none, or an older gradgraph wrote the step",
            remedy="build it again, with a rate or a schedule such as adamw(1e-3)",
            shell="build it again",
        )
    if not any(rate in reads(node) for node in model.graph.node):
        raise BuildError(
            "no weight of this step follows its learning rate: each group has a schedule of its own, or it updates "
            "no weight; give groups lr_factor instead of schedules"
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

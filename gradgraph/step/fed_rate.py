"""A step whose learning rate is a model input in place of its schedule in the graph, for the learning-rate finder."""

from __future__ import annotations

from dataclasses import replace

from onnx import TensorProto, helper

from gradgraph.errors import BuildError
from gradgraph.files.protos import copied, reads
from gradgraph.step.manifest import LEARNING_RATE, column
from gradgraph.step.step import Step

DEFAULT = 1e-3  # default of the input learning_rate


def with_fed_rate(step: Step, name: str = "") -> Step:
    """Return a copy of ``step`` with an input ``learning_rate`` instead of the schedule that computes it.

    ``name`` selects one of several named steps.

    Raises:
        BuildError: if the optimizer has no learning rate, if no weight depends on it, or if the train graph does not
            output it (an older gradgraph wrote the step).
    """
    rate, part = column(name, LEARNING_RATE), step.manifest.parts[name]
    model = copied(step.trains[name])
    makers = [node for node in model.graph.node if list(node.output) == [rate]]
    if rate not in part.reports or not makers:
        raise BuildError(
            "the learning rate of this step cannot be varied: its optimizer has none, or an older gradgraph wrote the "
            "step",
            remedy="build it again, with a learning rate or a schedule, such as adamw(1e-3)",
            shell="build it again",
        )
    if not any(rate in reads(node) for node in model.graph.node):
        raise BuildError(
            "no weight of this step depends on its learning rate: each parameter group has a schedule of its own, or "
            "the step updates no weight; use lr_factor instead of schedules for parameter groups"
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

"""The learning-rate schedule of a train graph.

While the step is built, the learning rate is an input; at the end, the nodes of the schedule replace it. Passes
therefore do not optimise the schedule or fold a constant one, so ``step.fed_rate`` can turn it back into an input.
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.autodiff.append import builder_for
from gradgraph.building.step_state import StepState
from gradgraph.graph.builder import Builder
from gradgraph.optim.schedules import Schedule
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.step.manifest import LEARNING_RATE, column


def write_schedule(model: ir.Model, state: StepState) -> None:
    """Write the schedule of ``state`` into a train graph, in place of the placeholder input for its rate.

    The rate becomes an output, unless the graph has an input ``learning_rate`` for another part of the optimizer.
    """
    schedule, fed, clock = state.schedule, _input(model, state.rate), _input(model, state.counter)
    if schedule is None or fed is None or clock is None:
        return
    graph, op = model.graph, builder_for(model)
    is_fed = LEARNING_RATE in state.rates
    rate = _written(op, schedule, clock, f"update/{LEARNING_RATE}" if is_fed else column(state.name, LEARNING_RATE))
    if not is_fed:
        state.reports[rate.name or ""] = rate
        following = {s.next for s in state.specs}
        graph.outputs.insert(sum(o.name not in following for o in graph.outputs), rate)
    graph.inputs.remove(fed)
    fed.replace_all_uses_with(rate)
    op.finish(graph, before=graph[0])


def _written(op: Builder, schedule: Schedule, clock: ir.Value, name: str) -> ir.Value:
    """Return the learning rate after ``clock`` updates; ``op`` gets its nodes and constants, after clean-up."""
    op.scope = "update"
    own = ir.Value(name=clock.name, type=clock.type, shape=clock.shape)
    rate = op.Identity(schedule.emit(op, op.cast(op.wrap(own), ir.DataType.FLOAT)), name=name).value
    rate.shape = ir.Shape(())
    graph = ir.Graph([own], [rate], nodes=[], opset_imports={}, name="schedule")
    op.finish(graph)
    clean_up(ir.Model(graph, ir_version=10))
    rate = graph.outputs[0]
    op.nodes, op.constants = list(graph), list(graph.initializers.values())
    graph.remove(op.nodes)
    graph.initializers.clear()
    graph.outputs.clear()
    own.replace_all_uses_with(clock)
    return rate


def _input(model: ir.Model, like: ir.Value | None) -> ir.Value | None:
    """Return the input of ``model`` called like ``like``; None for one half of a step that does not need it."""
    return next((v for v in model.graph.inputs if like is not None and v.name == like.name), None)

"""Writing eval.onnx: the model with loss and metrics, its state as inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from gradgraph.autodiff.append import builder_for
from gradgraph.manifest import MeasureSpec
from gradgraph.normal.simplifying.clean import clean_up
from gradgraph.objective import Objective, output_name
from gradgraph.passes.modes import evaluation_mode, moves_statistics
from gradgraph.selection import frozen_values


@dataclass(frozen=True)
class Evaluation:
    """eval.onnx: what it reads besides state, the model's own outputs, and what it adds to these."""

    model: ir.Model
    inputs: list[ir.Value]
    outputs: list[str]
    loss: str
    metrics: tuple[str, ...]
    measures: tuple[MeasureSpec, ...]


def evaluation(model: ir.Model, objective: Objective, trained: Sequence[str]) -> Evaluation:
    """Make ``model`` eval.onnx, in place: the loss behind it, its state as inputs."""
    graph = model.graph
    for name in objective.outputs:
        output_name(graph, name)  # an inner value becomes an output here, too
    inputs, outputs = list(graph.inputs), [v.name or "" for v in graph.outputs if v.name not in objective.kept]
    statistics = _moving_statistics(graph, trained)
    evaluation_mode(model)
    op = builder_for(model)
    loss, metrics, measures, *_ = objective.emit(op, graph)
    op.finish(graph)
    results = [loss, *metrics, *(sums for _, sums in measures)]
    graph.outputs[:] = list(dict.fromkeys([*results, *(v for v in graph.outputs if v.name in outputs)]))
    for name in (*trained, *statistics):
        if name in graph.initializers:
            _as_input(graph, name)
    names = tuple(m.name or "" for m in metrics)
    loss_name = loss.name or "loss"
    clean_up(model)  # a value that takes the place of another one takes its name
    return Evaluation(model, inputs, outputs, loss_name, names, tuple(spec for spec, _ in measures))


def _moving_statistics(graph: ir.Graph, trained: Sequence[str]) -> list[str]:
    """Running statistics that a training step updates: of layers that are not wholly frozen (see passes.modes)."""
    frozen = frozen_values(graph, trained)
    names = [v.name for n in graph if moves_statistics(n, frozen) for v in n.inputs[3:5] if v is not None]
    return list(dict.fromkeys(n for n in names if n))


def _as_input(graph: ir.Graph, name: str) -> ir.Value:
    """Turn an initializer into a required input (a default value would be ignored silently by some runtimes)."""
    value = graph.initializers.pop(name)
    value.const_value = None
    graph.inputs.append(value)
    return value

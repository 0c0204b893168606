"""Writing eval.onnx: the model with loss and metrics, its state as inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from gradgraph.autodiff.append import builder_for
from gradgraph.building.measured import Written
from gradgraph.building.objective import Objective, own_results
from gradgraph.building.outputs import output_name
from gradgraph.building.selection import as_input, frozen_values
from gradgraph.errors import BuildError, shown
from gradgraph.passes.modes import evaluation_mode, moves_statistics
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.step.manifest import MeasureSpec, column, spec_of


@dataclass(frozen=True)
class Figures:
    """The outputs of eval.onnx that an objective has written: loss, scalars, columns of sums."""

    loss: str
    metrics: tuple[str, ...]
    measures: tuple[MeasureSpec, ...]


@dataclass(frozen=True)
class Evaluation:
    """eval.onnx: what it reads besides state, the model's own outputs, and what each objective adds to these."""

    model: ir.Model
    inputs: list[ir.Value]
    outputs: list[str]
    figures: list[Figures]


def evaluation(model: ir.Model, objectives: Mapping[str, Objective], trained: Sequence[str]) -> Evaluation:
    """Make ``model`` eval.onnx, in place: the losses behind it, its state as inputs.

    Args:
        objectives: of the steps, by name; of one that is the only one, under "".
        trained: what any of them trains.
    """
    graph = model.graph
    for name in (name for objective in objectives.values() for name in objective.outputs):
        output_name(graph, name)  # an inner value becomes an output here, too
    kept = {name for objective in objectives.values() for name in objective.kept}
    inputs, outputs = list(graph.inputs), [v.name or "" for v in graph.outputs if v.name not in kept]
    statistics = _moving_statistics(graph, trained)
    evaluation_mode(model)
    op = builder_for(model)
    found = []
    for step, objective in objectives.items():
        written = objective.emit(op, graph)
        own_results(op, step, objective, written)
        _share_targets(graph)
        found.append(written)
    op.finish(graph)
    results = [v for w in found for v in (w.loss, *w.metrics, *(sums for _, sums in w.measures))]
    graph.outputs[:] = list(dict.fromkeys([*results, *(v for v in graph.outputs if v.name in outputs)]))
    for name in (*trained, *statistics):
        if name in graph.initializers:
            as_input(graph, name)
    figures = [_figures(step, written) for step, written in zip(objectives, found, strict=True)]
    clean_up(model)  # a value that takes the place of another one takes its name
    return Evaluation(model, inputs, outputs, figures)


def _figures(step: str, written: Written) -> Figures:
    measures = [replace(m, name=column(step, m.name), sums=sums.name or m.sums) for m, sums in written.measures]
    return Figures(written.loss.name or "loss", tuple(m.name or "" for m in written.metrics), tuple(measures))


def _share_targets(graph: ir.Graph) -> None:
    """Let two losses that compare with a target of one name read one input.

    Raises:
        BuildError: they take it in different forms.
    """
    known: dict[str | None, ir.Value] = {}
    for value in list(graph.inputs):
        first = known.setdefault(value.name, value)
        if first is value:
            continue
        if spec_of(first) != spec_of(value):
            raise BuildError(
                f"two steps take '{shown(value.name)}' in different forms ({spec_of(first)} and {spec_of(value)}); "
                "give one of them another target_name, or another name in targets"
            )
        value.replace_all_uses_with(first)
        graph.inputs.remove(value)


def _moving_statistics(graph: ir.Graph, trained: Sequence[str]) -> list[str]:
    """Running statistics that a training step updates: of layers that are not wholly frozen (see passes.modes)."""
    frozen = frozen_values(graph, trained)
    names = [v.name for n in graph if moves_statistics(n, frozen) for v in n.inputs[3:5] if v is not None]
    return list(dict.fromkeys(n for n in names if n))

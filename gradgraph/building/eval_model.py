"""Writing of eval.onnx: the model with loss and metrics, whose state tensors are inputs."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from gradgraph.autodiff.append import builder_for
from gradgraph.building.draft import Draft
from gradgraph.building.objective import own_results
from gradgraph.building.outputs import output_name
from gradgraph.building.selection import as_input, frozen_values
from gradgraph.data.record.specs import spec_of
from gradgraph.errors import BuildError, shown
from gradgraph.passes.modes import evaluation_mode, moves_statistics
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.step.manifest import column


def eval_graph(draft: Draft) -> Draft:
    """Turn the draft's model into eval.onnx, in place: append the losses of all parts, and turn state into inputs."""
    model, graph, objectives = draft.model, draft.model.graph, [part.objective for part in draft.parts]
    for name in (name for objective in objectives for name in objective.outputs):
        output_name(graph, name)  # makes the value an output if it is an inner value
    kept = {name for objective in objectives for name in objective.kept}
    draft.inputs = list(graph.inputs)
    draft.outputs = [v.name or "" for v in graph.outputs if v.name not in kept]
    frozen = frozen_values(graph, draft.trained)  # layers that are not wholly frozen update their running statistics
    moving = [v.name or "" for n in graph if moves_statistics(n, frozen) for v in n.inputs[3:5] if v is not None]
    evaluation_mode(model)
    op = builder_for(model)
    found = []
    for part in draft.parts:
        written = part.objective.emit(op, graph)
        own_results(op, part.name, part.objective, written)
        _share_targets(graph)
        found.append(written)
    op.finish(graph)
    results = [v for written in found for v in written.results]
    graph.outputs[:] = list(dict.fromkeys([*results, *(v for v in graph.outputs if v.name in draft.outputs)]))
    for weight in dict.fromkeys([*draft.trained, *moving]):
        if weight in graph.initializers:
            as_input(graph, weight)
    for part, written in zip(draft.parts, found, strict=True):
        columns = [replace(m, name=column(part.name, m.name), sums=sums.name or m.sums) for m, sums in written.measures]
        metrics = [m.name or "" for m in written.metrics]
        part.figures = {"loss_output": written.loss.name or "loss", "metrics": metrics, "measures": columns}
    clean_up(model)  # a replacement takes over the name of the value it replaces
    return draft


def _share_targets(graph: ir.Graph) -> None:
    """Merge the inputs of equally named targets; raise BuildError if losses need them in different shapes or types."""
    known: dict[str | None, ir.Value] = {}
    for value in list(graph.inputs):
        first = known.setdefault(value.name, value)
        if first is value:
            continue
        if spec_of(first) != spec_of(value):
            raise BuildError(
                f"two steps need the target '{shown(value.name)}' with different shapes or types ({spec_of(first)} and "
                f"{spec_of(value)}); give the target of one step another name, by target_name or targets"
            )
        value.replace_all_uses_with(first)
        graph.inputs.remove(value)

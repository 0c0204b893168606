"""Access to the values of a model that a loss or a metric reads, by name."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gradgraph.autodiff.path import carries, is_tensor
from gradgraph.autodiff.select import computed_outputs
from gradgraph.errors import BuildError, UnknownNameError, shown, suggestion


def output_of(graph: ir.Graph, name: str) -> ir.Value:
    """Return the graph output called ``name``, which must exist."""
    return next(v for v in graph.outputs if v.name == name)


def floating_outputs(graph: ir.Graph) -> list[str]:
    """Return the names of the floating-point outputs, which a loss can read."""
    return [v.name for v in graph.outputs if carries(v) and is_tensor(v) and v.name]


def default_outputs(graph: ir.Graph) -> list[str]:
    """Return the names of floating-point outputs, in the order in which losses read them by default.

    Outputs that depend on an input come first.
    """
    floating, computed = floating_outputs(graph), {v.name for v in computed_outputs(graph)}
    return sorted(floating, key=lambda name: name not in computed)


def output_name(graph: ir.Graph, output: str | None) -> str:
    """Return the name of the output that the loss reads: ``output``, or the default output for None.

    If ``output`` is an inner value, such as the logits before a Softmax, it becomes an output of the graph.
    """
    floating = floating_outputs(graph)
    if output is None:
        if not floating:
            raise BuildError(
                "the model has no floating-point output that a loss could read; set output to an inner value's name"
            )
        return default_outputs(graph)[0]
    if output not in floating:
        inner = next((v for n in graph for v in n.outputs if v.name == output and carries(v) and is_tensor(v)), None)
        if inner is None:
            raise UnknownNameError(
                f"the model has no floating-point output '{shown(output)}'{suggestion(output, floating)}"
            )
        graph.outputs.append(inner)
    return output


def make_outputs(model: ir.Model, names: Sequence[str]) -> list[str]:
    """Make the inner values among ``names`` outputs of the model, so that no pass removes them; return their names."""
    known = {v.name for v in model.graph.outputs}
    inner = {v.name: v for node in model.graph for v in node.outputs}
    added = [n for n in names if n in inner and n not in known]
    model.graph.outputs.extend(inner[n] for n in added)
    return added


def value_names(graph: ir.Graph) -> set[str]:
    """Return the names of all values, including those in subgraphs."""
    named = (
        (*g.inputs, *g.initializers.values(), *(y for node in g for y in node.outputs))
        for g in (graph, *graph.subgraphs())
    )
    return {v.name for values in named for v in values if v.name}

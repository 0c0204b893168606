"""Reverse mode on models in normal form, in place; and helpers that all transforms share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from gradgraph.autodiff.after import write_orders
from gradgraph.autodiff.recomputation import Recompute, bytes_of
from gradgraph.autodiff.recompute import Written, written_backward
from gradgraph.autodiff.select import UNUSED, Names, check_scalar, find_path, float_outputs, seed_of, select, target_of
from gradgraph.errors import DifferentiationError, shown
from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.normal.edit import names_of
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.rules import families
from gradgraph.rules.containers import cotangent_type

assert families  # importing them fills the registry


def append_gradients(
    work: ir.Model,
    output: str | None,
    wrt: Names,
    *,
    allow_unused: bool = False,
    named_operators: bool = False,
    recompute: Recompute | None = None,
) -> ir.Model:
    """Apply ``value_and_grad`` to a model in normal form, in place.

    With ``named_operators``, operators of the domain ``gradgraph`` are not expanded.
    """
    graph = work.graph
    target = target_of(graph, output)
    check_scalar(target)
    chosen = select(graph, wrt, [target])
    path = find_path(work, [target], chosen, allow_unused)
    (target,) = path.targets
    op = builder_for(work, named_operators)
    written = written_backward(op, path, {target: seed_of(op, target)}, graph)
    outputs = named(op, path.wrt, written.gradients, "grad", allow_unused)
    op.finish(graph)
    graph.outputs[:] = [target, *outputs]
    return _finished(work, op, written, recompute)


def append_vjp(
    work: ir.Model,
    outputs: Names,
    wrt: Names,
    *,
    allow_unused: bool = False,
    named_operators: bool = False,
    recompute: Recompute | None = None,
) -> ir.Model:
    """Apply ``vjp`` to a model in normal form, in place.

    With ``named_operators``, operators of the domain ``gradgraph`` are not expanded.
    """
    graph = work.graph
    targets = float_outputs(graph, outputs)
    chosen = select(graph, wrt, targets)
    path = find_path(work, targets, chosen, allow_unused)
    targets = path.targets
    op = builder_for(work, named_operators)
    seeds = {y: new_input(op, graph, f"{y.name}.cotangent", y) for y in targets}
    written = written_backward(op, path, seeds, graph)
    new = named(op, path.wrt, written.gradients, "grad", allow_unused)
    op.finish(graph)
    graph.outputs.extend(new)
    return _finished(work, op, written, recompute)


def _finished(work: ir.Model, op: Builder, written: Written, recompute: Recompute | None) -> ir.Model:
    """Simplify ``work`` in place, after inserting recomputation if ``recompute`` is not None, and return it."""
    if recompute is None:
        return clean_up(work)
    fed = [*work.graph.inputs, *work.graph.initializers.values(), *work.graph.outputs]
    recompute.apply(work, op, [written], sum(bytes_of(v, recompute.sizes, 1) for v in dict.fromkeys(fed)))
    clean_up(work)
    return work if op.named_operators else write_orders(work)


# --- results ---------------------------------------------------------------------------------------------


def builder_for(model: ir.Model, named_operators: bool = False) -> Builder:
    """Return a builder whose new names do not occur in ``model``."""
    return Builder(names_of(model), "grad", named_operators)


def new_input(op: Builder, graph: ir.Graph, name: str, like: ir.Value) -> Var:
    """Add an input to ``graph`` for the cotangent or tangent of ``like``, and return it."""
    value = ir.Value(name=op.fresh(name), type=cotangent_type(like), shape=like.shape)
    graph.inputs.append(value)
    return op.wrap(value)


def named(
    op: Builder, values: Sequence[ir.Value], results: Mapping[ir.Value, Var], suffix: str, allow_unused: bool = False
) -> list[ir.Value]:
    """Return the result for each of ``values`` as a value named ``<name>.<suffix>``, with its shape and element type.

    Args:
        op: adds nodes where a result is missing or must keep its name.
        values: the values with respect to which the model is differentiated.
        results: the gradient or tangent of each value that has one.
        suffix: the suffix of the new names.
        allow_unused: return zeros for missing results instead of raising an error.
    """
    outputs: dict[ir.Value, None] = {}
    for x in values:
        result = results.get(x)
        if result is None and not allow_unused:
            raise DifferentiationError(
                f"no gradient reaches '{shown(x.name)}': it is read only through inputs that have no derivative",
                **UNUSED,
            )
        result = op.zeros_like(op.wrap(x)) if result is None else result
        node = result.value.producer()
        if node is None or node.graph is not None or result.value in outputs:  # must keep its name
            result = op.Identity(result, name=f"{x.name}.{suffix}")
        else:
            result.value.name = op.fresh(f"{x.name}.{suffix}")
        result.value.type, result.value.shape = cotangent_type(x), x.shape
        outputs[result.value] = None
    return list(outputs)

"""Per-sample gradients of a batch: a Scan over samples, whose body is the model at batch size 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from gradgraph.autodiff.append import builder_for
from gradgraph.autodiff.path import Path
from gradgraph.autodiff.reverse import backward
from gradgraph.autodiff.samples import batched_inputs, check_independent, name_batch
from gradgraph.autodiff.scan_rows import scanned
from gradgraph.autodiff.select import Names, check_scalar, find_path, seed_of, select, target_of
from gradgraph.errors import DifferentiationError, Remedies, shown
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import as_dims
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.passes.normal.sizes.infer import infer_shapes
from gradgraph.rules.containers import cotangent_type

MIXED: Remedies = {
    "remedy": "take the jacobian of a vector of losses, or pass independent=True if samples do not mix",
    "shell": "pass --independent if samples do not mix",
}


def append_per_sample(
    work: ir.Model,
    output: str | None,
    wrt: Names,
    *,
    inputs: Names = None,
    independent: bool = False,
    allow_unused: bool = False,
    named_operators: bool = False,
    results: Callable[[Builder, Sequence[Var]], Mapping[str, Var]] | None = None,
) -> ir.Model:
    """Apply ``per_sample_gradients`` to a model in normal form, in place.

    With ``named_operators``, operators of the domain ``gradgraph`` are not expanded. ``results`` computes other outputs
    of a sample from its gradients, by name.
    """
    graph = work.graph
    size = name_batch(work, inputs)
    batched = batched_inputs(graph, inputs)
    op = builder_for(work, named_operators)
    target = target_of(graph, output)
    chosen = select(graph, wrt, [target], inner=False)
    path = find_path(work, [target], chosen, allow_unused)
    (target,) = path.targets
    if not independent:
        check_independent(graph, batched, target, path, MIXED)
    slices = _one_sample(op, work, batched, size)
    check_scalar(target)
    sources = [slices.get(x, x) for x in chosen]
    path = Path(graph, [target], sources)
    gradients = backward(op, path, {target: seed_of(op, target)})
    rows = [_row(op, gradients.get(x), x, allow_unused) for x in sources]
    found = None if results is None else results(op, [op.wrap(x) for x in rows])
    op.finish(graph)
    graph.outputs.clear()
    places = {s: op.wrap(x) for x, s in slices.items()}
    if found is not None:
        names, stacked = list(found), scanned(op, graph, places, [y.value for y in found.values()], size)
    else:
        stacked = scanned(op, graph, places, [target, *rows], size)
        names = [f"{target.name}.per_sample", *(f"{x.name}.per_sample_grad" for x in chosen)]
        stacked[0] = op.Reshape(stacked[0], [-1])
        stacked[0].value.shape = ir.Shape([size])
    for y, name in zip(stacked, names, strict=True):
        y.value.name = op.fresh(name)
    op.finish(graph)
    graph.outputs.extend(y.value for y in stacked)
    return clean_up(work)


def _row(op: Builder, dx: Var | None, x: ir.Value, allow_unused: bool) -> ir.Value:
    if dx is None and not allow_unused:
        raise DifferentiationError(
            f"no gradient reaches '{shown(x.name)}': it is read only through inputs that have no derivative",
            remedy="remove it from `wrt`, or pass allow_unused=True for zeros",
            shell="remove it from --wrt",
        )
    row = op.zeros_like(op.wrap(x)) if dx is None else dx
    row.value.type, row.value.shape = cotangent_type(x), x.shape
    return row.value


# --- the batch -------------------------------------------------------------------------------------------


def _one_sample(op: Builder, work: ir.Model, batched: Sequence[ir.Value], size: str) -> Mapping[ir.Value, ir.Value]:
    """Rewrite the graph for batch size 1; return the new value of each of ``batched``, without the batch axis."""
    slices: dict[ir.Value, ir.Value] = {}
    values = [v for node in nodes_of(work) for v in node.outputs]
    for v in (*values, *work.graph.outputs):
        if v.shape is not None and size in as_dims(v.shape):
            v.shape = ir.Shape([1 if d == size else d for d in as_dims(v.shape)])
    first = next(iter(work.graph), None)
    for x in batched:
        assert x.shape is not None
        row = ir.Value(name=op.fresh(f"{x.name}.row"), type=x.type, shape=ir.Shape(as_dims(x.shape)[1:]))
        one = op.Unsqueeze(op.wrap(row), [0])
        one.value.type, one.value.shape = x.type, ir.Shape([1, *as_dims(x.shape)[1:]])
        x.replace_all_uses_with(one.value)
        slices[x] = row
    op.finish(work.graph, before=first)
    work.graph.inputs.extend(slices.values())  # while shapes are inferred
    infer_shapes(work)
    for row in slices.values():
        work.graph.inputs.remove(row)
    return slices

"""Second derivatives of a scalar: the Hessian-vector product, forward over reverse."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.autodiff.append import builder_for, named
from gradgraph.autodiff.forward import add_tangents
from gradgraph.autodiff.reverse import backward
from gradgraph.autodiff.select import Names, check_scalar, find_path, seed_of, select, target_of
from gradgraph.passes.normal.sizes.infer import infer_shapes


def append_hvp(
    work: ir.Model, output: str | None, wrt: Names, *, allow_unused: bool = False, named_operators: bool = False
) -> ir.Model:
    """Apply ``hvp`` to a model in normal form, in place.

    With ``named_operators``, operators of the domain ``gradgraph`` are not expanded in the second derivative.
    """
    target = target_of(work.graph, output)
    check_scalar(target)
    chosen = select(work.graph, wrt, [target])
    gradients, chosen = gradients_of(work, target, chosen, allow_unused)
    path = find_path(work, gradients, chosen, allow_unused=True)  # a constant gradient has a zero tangent
    return add_tangents(work, path, chosen, "hvp", named_operators)


def gradients_of(
    model: ir.Model, target: ir.Value, wrt: list[ir.Value], allow_unused: bool
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Add the gradient of the sum of ``target`` with respect to each of ``wrt`` to ``model``.

    Returns the gradients, and ``wrt`` with the values that replaced some of them (see ``find_path``).
    """
    path = find_path(model, [target], wrt, allow_unused)
    (target,) = path.targets
    op = builder_for(model)
    gradients = backward(op, path, {target: seed_of(op, target)})
    values = named(op, path.wrt, gradients, "grad", allow_unused)
    op.finish(model.graph)
    infer_shapes(model)
    return values, path.wrt

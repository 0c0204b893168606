"""Second derivatives of a scalar: the Hessian-vector product, forward over reverse."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.autodiff.forward import add_tangents
from gradgraph.autodiff.reverse import backward
from gradgraph.autodiff.select import Names, check_scalar, find_path, select, target_of
from gradgraph.autodiff.transforms import Result, as_given, builder_for, named
from gradgraph.collector import paused_collection
from gradgraph.files import Source
from gradgraph.normal import normalise
from gradgraph.normal.infer import infer_shapes


@paused_collection()
def hvp(model: Source, output: str | None = None, wrt: Names = None, *, allow_unused: bool = False) -> Result:
    """A model that also returns the Hessian-vector product of a scalar: ``<name>.hvp = Σ H(name, other) · tangent``.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        output: the floating output (or any inner value) to differentiate twice, with exactly one element; by default
            the first output.
        wrt: names and globs of inputs and initializers, as for ``value_and_grad``. The sum runs over all of them; for
            each the result has a new input ``"<name>.tangent"`` of the tensor's shape and type.
        allow_unused: give zeros for names that ``output`` does not depend on, instead of an error.

    Returns:
        The same kind of model (a path gives a ``ModelProto``): the original outputs, then ``"<name>.hvp"`` for each
        name, in its tensor's shape and type.

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError: as for ``value_and_grad``.
    """
    work = normalise(model, parameters=wrt)
    target = target_of(work.graph, output)
    check_scalar(target)
    chosen = select(work.graph, wrt, [target])
    gradients = _gradients(work, target, chosen, allow_unused)
    path = find_path(work, gradients, chosen, allow_unused=True)  # where a gradient is constant, its tangent is zero
    add_tangents(work, path, chosen, "hvp")
    return as_given(model, work)


def _gradients(model: ir.Model, target: ir.Value, wrt: list[ir.Value], allow_unused: bool) -> list[ir.Value]:
    """The gradient of ``target`` by each of ``wrt``, written into ``model``."""
    path = find_path(model, [target], wrt, allow_unused)
    (target,) = path.targets
    op = builder_for(model)
    gradients = backward(op, path, {target: op.ones_like(op.wrap(target))})
    values = named(op, wrt, gradients, "grad", allow_unused)
    op.finish(model.graph)
    infer_shapes(model)
    return values

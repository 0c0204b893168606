"""Gradients inside a traced function, of traced tensors with respect to traced tensors, as nodes of the same graph.

Gradients consist of differentiable operators, so they can be differentiated again, by a second ``grad`` or by the
training step of the network.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast, overload

from gradgraph.autodiff.path import Path, carries
from gradgraph.autodiff.reverse import backward, check_rules
from gradgraph.errors import DifferentiationError, ModelError, counted, shown
from gradgraph.frontend.shaping import expand
from gradgraph.frontend.trace import TensorLike, Value, current, op, tensor, wrap
from gradgraph.graph.builder import Var
from gradgraph.graph.checks import describe
from gradgraph.graph.marks import is_marked_constant, mark_detached
from gradgraph.rules import families

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["detach", "grad", "jvp", "stop_gradient", "vjp"]

assert families  # the imports fill the registry


def detach(x: TensorLike) -> Tensor:
    """Return ``x`` with its gradient stopped, both for ``grad`` and in the training step.

    In the file it is an Identity, marked in its metadata (``gradgraph.role: detached``): runtimes treat it as the
    identity, and a step built from the file stops the gradient, too.
    """
    x = tensor(x)
    if is_marked_constant(x.traced.value):
        return x
    result = op.Identity(x, shape=x.shape)
    node = result.traced.value.producer()
    assert node is not None
    mark_detached(node)
    return result


stop_gradient = detach


@overload
def grad(y: Value, x: Value, allow_unused: bool = False) -> Tensor: ...
@overload
def grad(y: Value, x: Sequence[Value], allow_unused: bool = False) -> tuple[Tensor, ...]: ...


def grad(y: Value, x: Value | Sequence[Value], allow_unused: bool = False) -> Tensor | tuple[Tensor, ...]:
    """Return the gradient of a scalar with respect to a tensor, or to each of several tensors.

    Each gradient has the shape and element type of the tensor in ``x``.

    Args:
        y: a floating-point tensor with one element.
        x: floating-point tensors that ``y`` was computed from: inputs, parameters or inner values.
        allow_unused: whether to return zeros for tensors that ``y`` does not depend on, instead of raising an error.

    Raises:
        DifferentiationError: if ``y`` has several elements or does not depend on ``x``, or a tensor is not
            floating-point.
        UnsupportedOperatorError: if operators between ``x`` and ``y`` have no gradient rule; the message lists them.
    """
    target = _floating(y, "y")
    if any(not isinstance(d, int) or d != 1 for d in target.shape):
        raise DifferentiationError(
            f"grad of a tensor of shape {target.shape}; grad requires a scalar: reduce it with .sum() (independent "
            "rows keep their own gradients), or use vjp(y, x, cotangent)"
        )
    found = _pulled(target, _several(x), current().builder.ones_like(target.traced), allow_unused)
    return found[0] if isinstance(x, Value) else tuple(found)


@overload
def vjp(y: Value, x: Value, cotangent: TensorLike, allow_unused: bool = False) -> Tensor: ...
@overload
def vjp(y: Value, x: Sequence[Value], cotangent: TensorLike, allow_unused: bool = False) -> tuple[Tensor, ...]: ...


def vjp(
    y: Value, x: Value | Sequence[Value], cotangent: TensorLike, allow_unused: bool = False
) -> Tensor | tuple[Tensor, ...]:
    """Return the vector-Jacobian product ``J(y, x)ᵀ · cotangent``, as ``torch.autograd.grad(y, x, cotangent)`` does.

    Args:
        y, x, allow_unused: as for ``grad``; ``y`` may have any shape.
        cotangent: a tensor of the shape of ``y``, or of a shape that broadcasts to it.
    """
    target = _floating(y, "y")
    found = _pulled(target, _several(x), _fitting(cotangent, target).traced, allow_unused)
    return found[0] if isinstance(x, Value) else tuple(found)


def jvp(
    y: Value, x: Value | Sequence[Value], tangent: TensorLike | Sequence[TensorLike], allow_unused: bool = False
) -> Tensor:
    """Return the Jacobian-vector product ``Σ J(y, x) · tangent``: the directional derivative of ``y`` as each ``x``
    changes along its tangent.

    Args:
        y, x, allow_unused: as for ``grad``; ``y`` may have any shape.
        tangent: for each tensor in ``x``, a tensor of the same shape, or of a shape that broadcasts to it.

    Returns:
        A tensor of the shape of ``y``.
    """
    target, sources = _floating(y, "y"), _several(x)
    tangents = [tangent] if isinstance(x, Value) else list(cast("Sequence[TensorLike]", tangent))
    if len(tangents) != len(sources):
        raise ModelError(
            f"jvp with respect to {counted(len(sources), 'tensor')} got "
            f"{counted(len(tangents), 'tangent')}; pass one for each"
        )
    cotangent = detach(target)  # Jᵀ·c is linear in c, so its derivative with respect to c does not read c
    pulled = _pulled(target, sources, cotangent.traced, allow_unused)
    along = [_fitting(t, wrap(source.traced)) for t, source in zip(tangents, sources, strict=True)]
    moved = [_pulled(slope, [cotangent], t.traced, True)[0] for slope, t in zip(pulled, along, strict=True)]
    return functools.reduce(lambda a, b: a + b, moved)


def _several(x: Value | Sequence[Value]) -> list[Value]:
    sources = list(x) if isinstance(x, list | tuple) else [cast("Value", x)]
    if not sources:
        raise ModelError("x is an empty list; pass at least one tensor to differentiate with respect to")
    return sources


def _fitting(given: TensorLike, like: Tensor) -> Tensor:
    """Return ``given``, cast and broadcast to the element type and shape of ``like``."""
    x = tensor(given, like.dtype)
    return x if str(x.shape) == str(like.shape) else expand(x, like.shape)


def _floating(x: Value, role: str) -> Tensor:
    if not isinstance(x, Value):
        raise DifferentiationError(f"{role} is {type(x).__name__}; gradients require traced tensors")
    found = wrap(x.traced)
    if not carries(found.traced.value):
        raise DifferentiationError(
            f"{role} '{shown(found.traced.value.name)}' is {found.dtype.name.lower()}; only floating-point tensors "
            "have gradients"
        )
    return found


def _pulled(y: Tensor, x: Sequence[Value], seed: Var, allow_unused: bool) -> list[Tensor]:
    trace = current()
    sources = [_floating(source, "x").traced.value for source in x]
    target = y.traced.value
    path = Path([*trace.before, *trace.builder.nodes], [target], sources)
    for source in sources if not allow_unused else ():
        if source not in path.active:
            raise DifferentiationError(
                f"'{shown(target.name)}' does not depend on '{shown(source.name)}': {path.where_it_ends(source)}",
                remedy="differentiate with respect to a tensor that it was computed from, or pass allow_unused=True "
                "for zeros",
            )
    # a training step switches these operators to training mode, but the gradient here is that of their inference mode
    own, builder = set(trace.builder.nodes), trace.builder
    for node in path.every_node:
        if node in own and node.op_type in ("Dropout", "BatchNormalization"):
            raise DifferentiationError(
                f"the gradient passes through {describe(node)}, whose training mode differs from the inference mode "
                "that is traced here; take the gradient in a loss function (gradgraph.build(model, loss=f)), which is "
                "traced in both modes, or use a layer without modes, such as LayerNorm"
            )
    check_rules(path)
    with builder.naming_operators(False):  # gradient operators cannot be differentiated
        found = backward(builder, path, {target: seed})
    results = []
    for source in sources:
        like, gradient = builder.wrap(source), found.get(source)
        results.append(wrap(builder.zeros_like(like) if gradient is None else builder.like(gradient, like)))
    return results

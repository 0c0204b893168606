"""Gradient rules of random operators: only Dropout has a gradient."""

from __future__ import annotations

from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.registry import Gradients, case, no_gradient, point, real, vjp

no_gradient("a random draw", "Bernoulli", "Multinomial", "RandomNormal", "RandomUniform")
no_gradient("a random draw; only the shape of the input matters", "RandomNormalLike", "RandomUniformLike")

_OTHER_MASK = "onnxruntime and the oracle draw different masks"


@vjp(
    "Dropout",
    case(real(2, 3)),
    case(real(2, 3), 0.3),
    case(real(2, 3), 0.3, False, outputs=2),
    case(real(3, 4), 0.3, True, seed=7, onnxruntime=_OTHER_MASK),
    case(real(3, 4), 0.3, True, seed=7, outputs=2, onnxruntime=_OTHER_MASK),
    case(real(3, 4), None, True, seed=7, onnxruntime=_OTHER_MASK),
    case(real(2, 3), 0.0, True),
    case(real(0, 3), 0.3, True),
    point([1.0, 2.0], 0.5, False, gives=[[1.0, 1.0], None, None]),
    settings=[1],  # the ratio
)
def dropout(
    op: Builder,
    dys: tuple[Var | None, ...],
    ys: tuple[Var, ...],
    x: Var,
    ratio: Var | None = None,
    training: Var | None = None,
    *,
    seed: int | None = None,
) -> Gradients:
    dy = dys[0]
    if dy is None or training is None or (training.const is not None and not training.const.any()):
        return (dy,)  # evaluation: the identity, regardless of the ratio
    rate = op.const(0.5, dy.dtype) if ratio is None else op.cast(ratio, dy.dtype)
    factor = op.Reciprocal(1.0 - rate)
    if training.const is None:
        factor = op.Where(training, factor, 1.0)
    mask = op.output(ys[0], 1)  # the mask of this forward pass; all true in evaluation mode
    return (dy * (op.cast(mask, dy.dtype) * factor),)

"""Gradient rules of Softmax, LogSoftmax and classification losses.

Every formula uses the output (a probability or its logarithm), which is finite even where the exponential of a logit
of ±200 would overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.named_operators import named_operator
from gradgraph.rules.placement import scattered
from gradgraph.rules.registry import Gradients, case, integers, no_gradient, point, positive, real, uniform, vjp

no_gradient("one-hot, hence piecewise constant", "Hardmax")


_ALONG_AXES = (
    case(real(2, 3)),
    case(real(2, 3, 4), axis=0),
    case(real(2, 3, 4), axis=1),
    case(real(2, 3, 4), axis=-2),
    case(real(4)),
    case(real(2, 1)),
    case(real(0, 3)),
    case(uniform(-200, 200, 3, 4)),
)


@vjp(
    "Softmax",
    *_ALONG_AXES,
    case(real(2, 3, 3), real(2, 3, 2), graph="p = Softmax<axis=1>(x0)  y0 = MatMul(p, x1)"),
    case(real(2, 3, 3), real(2, 3, 2), graph="p = Softmax<axis=-2>(x0)  y0 = MatMul(p, x1)"),
    point([200.0, -200.0, 0.0], gives=[[0.0, 0.0, 0.0]]),
)
def softmax(op: Builder, dy: Var, y: Var, x: Var, *, axis: int) -> Gradients:
    return (softmax_gradient(op, dy, y, axis=axis),)


@named_operator(
    "SoftmaxGrad",
    case(real(2, 3), positive(2, 3), axis=-1),
    case(real(2, 3, 4), positive(2, 3, 4), axis=1),
    case(real(2, 3, 4), positive(2, 3, 4), real(2, 3, 2), real(2, 3, 2), axis=-1),
    like=[1],
)
def softmax_gradient(op: Builder, dy: Var, y: Var, do: Var | None = None, o: Var | None = None, *, axis: int) -> Var:
    """Return ``y·(dy − Σ dy·y)``, summed along ``axis``.

    For attention probabilities y, Σ do·o equals Σ dy·y; it is used instead if the attention's output ``o`` and its
    cotangent ``do`` are passed.
    """
    weighed = dy * y if do is None or o is None else do * o
    return y * (dy - op.ReduceSum(weighed, [axis], keepdims=1))


# the cotangent of LogSoftmax is the result of a scatter: zeros where other elements were written
_OVERWRITTEN = "h = LogSoftmax(x0)  s = ScatterElements<axis=1>(h, x1, x2)  y0 = Exp(s)"


@vjp(
    "LogSoftmax",
    *_ALONG_AXES,
    case(real(3, 4), [[1], [3], [0]], real(3, 1), graph=_OVERWRITTEN),
    point([200.0, -200.0], gives=[[-1.0, 1.0]]),
)
def log_softmax(op: Builder, dy: Var, y: Var, x: Var, *, axis: int) -> Gradients:
    return (log_softmax_gradient(op, dy, y, axis=axis),)


@named_operator(
    "LogSoftmaxGrad",
    case(real(2, 3), uniform(-3.0, -0.1, 2, 3), axis=-1),
    case(real(2, 3, 4), uniform(-3.0, -0.1, 2, 3, 4), axis=1),
    like=[1],
)
def log_softmax_gradient(op: Builder, dy: Var, y: Var, *, axis: int) -> Var:
    return dy - op.Exp(y) * op.ReduceSum(dy, [axis], keepdims=1)


@named_operator(
    "CrossEntropyGrad",
    case(uniform(-3.0, -0.1, 3, 4), [[1], [3], [0]], real(3, 1), axis=-1),
    case(uniform(-3.0, -0.1, 2, 3, 4), [[[1, 2, 0, 0]], [[0, 1, 2, 1]]], real(2, 1, 4), axis=1),
)
def cross_entropy_gradient(op: Builder, log_p: Var, places: Var, d: Var, *, axis: int) -> Var:
    """Return the gradient of logits, ``d·(onehot(places) − p)``; d is the gradient of log p at one index per row."""
    return scattered(op, op.Exp(log_p) * -d, places, d, axis, "add")


# --- losses ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Targets:
    """Class labels prepared for indexing; an ignored sample has label 0 and is False in ``counted``."""

    labels: Var  # [N, d1, …]
    places: Var  # [N, 1, d1, …]: indices along the class axis
    counted: Var | None  # boolean like ``labels``; None if every sample counts

    @staticmethod
    def of(op: Builder, target: Var, ignore_index: int | None) -> Targets:
        if ignore_index is None:
            return Targets(target, op.Unsqueeze(target, [1]), None)
        counted = ~op.Equal(target, ignore_index)
        labels = op.Where(counted, target, 0)
        return Targets(labels, op.Unsqueeze(labels, [1]), counted)

    def where_counted(self, op: Builder, x: Var) -> Var:
        return x if self.counted is None else op.Where(self.counted, x, 0.0)

    def weights(self, op: Builder, w: Var | None, dtype: ir.DataType) -> Var | None:
        """Return the weight of each sample; None if all weights are 1."""
        if w is not None:
            return self.where_counted(op, op.Gather(w, self.labels))
        return None if self.counted is None else op.cast(self.counted, dtype)


def _total(op: Builder, targets: Targets, weights: Var | None, dtype: ir.DataType, reduction: str) -> Var | None:
    """Return the divisor for the reduction "mean", the sum of the samples' weights; None for other reductions."""
    if reduction != "mean":
        return None
    return _count(op, targets.labels, dtype) if weights is None else op.ReduceSum(weights, keepdims=0)


def _count(op: Builder, x: Var, dtype: ir.DataType) -> Var:
    known = x.shape
    size = op.ReduceProd(op.shape(x), keepdims=0) if shapes.is_static(known) else op.Size(x)
    return op.cast(size, dtype) if size.const is None else op.const(size.const, dtype)


def _weight_gradient(
    op: Builder, dloss: Var, total: Var | None, loss: Var, log_p: Var, targets: Targets, w: Var
) -> Var:
    # for L = Σ w nll / Σ w, ∂L/∂w = (nll − L) / Σ w; without the division it is nll
    nll = -op.Squeeze(op.GatherElements(log_p, targets.places, axis=1), [1])
    terms = targets.where_counted(op, dloss * nll if total is None else dloss / total * (nll - loss))
    labels, terms = op.Reshape(targets.labels, [-1]), op.Reshape(terms, [-1])
    return scattered(op, op.zeros_like(w), labels, terms, axis=0, reduction="add")


def _sample_cotangents(
    op: Builder, dloss: Var, total: Var | None, weights: Var | None, targets: Targets, reduction: str
) -> Var:
    """Return ∂loss/∂nll, the cotangent of each sample's loss, [N, 1, d1, …]; 0 for ignored samples, even if all are."""
    if weights is None:
        shared = dloss if total is None else dloss / total
        return op.Unsqueeze(shared, [1]) if reduction == "none" else op.Expand(shared, op.shape(targets.places))
    shares = weights if total is None else weights / total  # the inverse of tiny weights overflows
    return op.Unsqueeze(targets.where_counted(op, dloss * shares), [1])


_LOSS_CASES = [
    case(real(3, 4), integers(0, 4, 3)),
    case(real(3, 4), integers(0, 4, 3), reduction="sum"),
    case(real(3, 4), integers(0, 4, 3), reduction="none"),
    case(real(3, 4), integers(0, 4, 3), positive(4)),
    case(real(3, 4), integers(0, 4, 3), positive(4), reduction="sum"),
    case(real(3, 4), integers(0, 4, 3), positive(4), reduction="none"),
    case(real(3, 4), [1, 1, 3], ignore_index=1),
    case(real(3, 4), [-1, 2, 3], ignore_index=-1, reduction="sum"),
    case(real(3, 4), [255, 2, 3], ignore_index=255, reduction="none"),
    case(real(4, 4), [-100, 2, 3, 2], positive(4), ignore_index=-100),
    case(real(4, 4), [0, 2, 3, 2], positive(4), ignore_index=2, reduction="none"),
    case(real(4, 4), np.array([0, 2, 3, 2], np.int32), positive(4), ignore_index=2, reduction="sum"),
    case(real(2, 4, 3), integers(0, 4, 2, 3)),
    case(real(2, 4, 3, 2), integers(0, 4, 2, 3, 2), positive(4)),
    case(real(2, 3, 2), [[0, 9], [2, 9]], positive(3), ignore_index=9, reduction="none"),
    case(real(2, 1), [0, 0]),
    case(real(2, 1), [0, 5], ignore_index=5),  # class 0 only
]


@vjp(
    "NegativeLogLikelihoodLoss",
    *_LOSS_CASES,
    # all samples are ignored: the mean is 0/0, its gradient is zero
    point([[1.0, 2.0], [3.0, 4.0]], [5, 5], gives=[[[0.0, 0.0], [0.0, 0.0]], None], ignore_index=5),
)
def negative_log_likelihood_loss(
    op: Builder,
    dloss: Var,
    loss: Var,
    x: Var,
    target: Var,
    w: Var | None = None,
    *,
    reduction: str,
    ignore_index: int | None = None,
) -> Gradients:
    targets = Targets.of(op, target, ignore_index)
    weights = targets.weights(op, w, x.dtype)
    total = _total(op, targets, weights, dloss.dtype, reduction)
    dnll = _sample_cotangents(op, dloss, total, weights, targets, reduction)
    dx = scattered(op, op.zeros_like(x), targets.places, -dnll, axis=1, reduction="add")
    return dx, None, None if w is None else _weight_gradient(op, dloss, total, loss, x, targets, w)


@vjp(
    "SoftmaxCrossEntropyLoss",
    *_LOSS_CASES,
    case(uniform(-200, 200, 3, 4), integers(0, 4, 3), positive(4)),
    case(real(3, 4), integers(0, 4, 3), outputs=2),
    case(real(3, 4), integers(0, 4, 3), outputs=2, read=[1]),
    case(real(2, 4, 3), integers(0, 4, 2, 3), positive(4), outputs=2, reduction="none", ignore_index=0),
    point([[200.0, -200.0]], [1], gives=[[[1.0, -1.0]], None]),
    point([[1.0, 2.0], [3.0, 4.0]], [5, 5], gives=[[[0.0, 0.0], [0.0, 0.0]], None], ignore_index=5),
)
def softmax_cross_entropy_loss(
    op: Builder,
    dys: tuple[Var | None, ...],
    ys: tuple[Var, ...],
    x: Var,
    target: Var,
    w: Var | None = None,
    *,
    reduction: str,
    ignore_index: int | None = None,
) -> Gradients:
    log_p = op.like(op.output(ys[0], 1), x)
    dloss, *others = dys
    dlog_p = others[0] if others else None
    through_log_p = None if dlog_p is None else log_softmax_gradient(op, dlog_p, log_p, axis=1)
    if dloss is None:
        return (through_log_p,)
    dx, _, dw = labels_gradient(op, dloss, ys[0], log_p, target, w, reduction=reduction, ignore_index=ignore_index)
    return dx if through_log_p is None else dx + through_log_p, None, dw


def labels_gradient(
    op: Builder,
    dloss: Var,
    loss: Var,
    log_p: Var,
    target: Var,
    w: Var | None,
    *,
    reduction: str,
    ignore_index: int | None = None,
) -> tuple[Var, None, Var | None]:
    """Return the gradients of the inputs of a classification loss: logits, target (None) and class weights.

    ``log_p`` is the LogSoftmax of the logits; ``w`` are the class weights.
    """
    targets = Targets.of(op, target, ignore_index)
    weights = targets.weights(op, w, log_p.dtype)
    total = _total(op, targets, weights, dloss.dtype, reduction)
    dnll = _sample_cotangents(op, dloss, total, weights, targets, reduction)
    dx = cross_entropy_gradient(op, log_p, targets.places, -dnll, axis=1)
    return dx, None, None if w is None else _weight_gradient(op, dloss, total, loss, log_p, targets, w)

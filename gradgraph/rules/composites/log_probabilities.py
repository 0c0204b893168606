"""Composites of classification losses, which select one log-probability per row of a LogSoftmax.

Their rules compute the gradient of the logits directly, without a gradient of all log-probabilities in memory.
"""

from __future__ import annotations

from typing import Any

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shape_inference import shape_of
from gradgraph.rules.composites.table import Found, composite
from gradgraph.rules.patterns import Walk, need, some
from gradgraph.rules.registry import Gradients, attributes, case, integers, point, positive, real
from gradgraph.rules.softmax import cross_entropy_gradient, labels_gradient


def find_picked(walk: Walk) -> Found:
    """Match a GatherElements that selects one log-probability per row of a LogSoftmax, along its axis."""
    log_p, places = walk.last.inputs
    softmax = walk.to(log_p, "LogSoftmax")
    size, chosen = shape_of(some(log_p)), shape_of(some(places))
    axis = attributes(softmax)["axis"] % len(some(size))
    one_each = [1 if i == axis else d for i, d in enumerate(some(size))]
    need(attributes(walk.last)["axis"] % len(one_each) == axis and None not in some(chosen))
    need(list(some(chosen)) == one_each)
    return Found(tuple(softmax.inputs), (log_p, places), {"axis": axis})


_ROWS = "h = LogSoftmax(x0)  y0 = GatherElements<axis=1>(h, x1)"
_COLUMNS = "h = LogSoftmax<axis=1>(x0)  y0 = GatherElements<axis=1>(h, x1)"


@composite(
    "PickedLogProbability",
    ["GatherElements"],
    find_picked,
    case(real(3, 4), [[1], [3], [0]], graph=_ROWS),
    case(real(3, 4), [[1], [-1], [0]], graph=_ROWS),
    case(real(3, 4), [[1], [3], [0]], graph="h = LogSoftmax(x0)  y0 = GatherElements<axis=-1>(h, x1)"),
    case(real(2, 3, 4), [[[1, 2, 0, 0]], [[0, 1, 2, 1]]], graph=_COLUMNS),
    case(real(3, 4), [[1], [3], [0]], graph=f"{_ROWS}  y1 = Exp(h)", outputs=2),
    # not matched: fewer rows, along the other axis, several per row
    case(real(3, 4), [[1], [-1]], graph=_ROWS),
    case(real(2, 3, 4), [[[1, 2, 0, 0]]], graph=_COLUMNS),
    case(real(3, 4), [[1, 2, 0, 0]], graph="h = LogSoftmax(x0)  y0 = GatherElements<axis=0>(h, x1)"),
    case(real(3, 4), [[1], [2], [0]], graph="h = LogSoftmax(x0)  y0 = GatherElements<axis=0>(h, x1)"),
    case(real(3, 4), [[1, 3], [3, 0], [0, 2]], graph=_ROWS),
    case(real(2, 3), [[1, 1, 0], [2, 0, 0]], graph=_ROWS),
)
def picked_log_probability(op: Builder, dy: Var, y: Var, x: Var, log_p: Var, places: Var, *, axis: int) -> Gradients:
    return (cross_entropy_gradient(op, log_p, places, dy, axis=axis),)


def find_likelihood(walk: Walk) -> Found:
    """Match a NegativeLogLikelihoodLoss of a LogSoftmax over the classes."""
    log_p, *others = walk.last.inputs
    softmax = walk.to(log_p, "LogSoftmax")
    need(attributes(softmax)["axis"] % len(some(shape_of(some(log_p)))) == 1)
    target, w = (*others, None)[:2]
    return Found((softmax.inputs[0], target, w), (log_p,), attributes(walk.last))


_LOSS = "h = LogSoftmax<axis=1>(x0)  y0 = NegativeLogLikelihoodLoss"


@composite(
    "CrossEntropy",
    ["NegativeLogLikelihoodLoss"],
    find_likelihood,
    case(real(3, 4), integers(0, 4, 3), graph=f"{_LOSS}(h, x1)"),
    case(real(3, 4), integers(0, 4, 3), graph="h = LogSoftmax(x0)  y0 = NegativeLogLikelihoodLoss(h, x1)"),
    case(real(3, 4), integers(0, 4, 3), positive(4), graph=f"{_LOSS}(h, x1, x2)"),
    case(real(2, 4, 3), integers(0, 4, 2, 3), positive(4), graph=f'{_LOSS}<reduction = "none">(h, x1, x2)'),
    case(real(3, 4), [1, 1, 3], graph=f'{_LOSS}<reduction = "sum", ignore_index = 1>(h, x1)'),
    case(real(3, 4), integers(0, 4, 3), graph=f"{_LOSS}(h, x1)  y1 = Exp(h)", outputs=2),
    point([[1.0, 2.0], [3.0, 4.0]], [5, 5], gives=[[[0.0, 0.0]] * 2, None], graph=f"{_LOSS}<ignore_index = 5>(h, x1)"),
)
def cross_entropy(
    op: Builder, dy: Var, y: Var, x: Var, target: Var, w: Var | None, log_p: Var, **attrs: Any
) -> Gradients:
    return labels_gradient(op, dy, y, log_p, target, w, **attrs)

"""The loss of unaligned label sequences: connectionist temporal classification (CTC)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, ModelError
from gradgraph.frontend.loss import Spec, Target, named, reduced
from gradgraph.frontend.pointwise import cast, logical_and, maximum, real, where
from gradgraph.frontend.reductions import logsumexp
from gradgraph.frontend.scans import scanned
from gradgraph.frontend.shaping import cat, stack
from gradgraph.frontend.subscripts import arange, full, gather
from gradgraph.frontend.trace import TensorLike, current, op, tensor
from gradgraph.graph.builder import Var
from gradgraph.graph.shapes import Shape

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

__all__ = ["ctc_loss"]

NOTHING = -1e30  # in place of log 0 = −∞, whose gradients would be NaN; log-probabilities are negligible next to it


def ctc_loss(
    log_probs: TensorLike,
    targets: TensorLike,
    input_lengths: TensorLike,
    target_lengths: TensorLike,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """``−log Σ p(path)`` over all alignments (paths) that yield the labels (``F.ctc_loss``); "mean" divides the loss of
    each row by its number of labels.

    Args:
        log_probs: log-probabilities ``[T, N, C]``.
        targets: labels ``[N, S]``, padded after ``target_lengths``.
        input_lengths, target_lengths: ``[N]``; a row with an input length above T has a loss of NaN.
        blank: the index of the blank class.
        reduction: "mean", "sum", or "none" for the loss of each row.
        zero_infinity: whether rows whose labels do not fit into their input have a loss of 0 instead of ∞.
    """
    x = real(log_probs)
    kind = x.dtype
    x = cast(x, ir.DataType.FLOAT) if kind.bitwidth < 32 else x
    labels, steps, lengths = (cast(t, ir.DataType.INT64) for t in (targets, input_lengths, target_lengths))
    if (x.ndim, labels.ndim) != (3, 2):
        raise ModelError(
            f"ctc got log-probabilities of shape {x.shape} and labels of shape {labels.shape}; expected [T, N, C] and "
            "[N, S]"
        )
    states, may_skip = _states(labels, lengths, blank)
    last = _last(x, states, may_skip, steps)
    end = lengths.unsqueeze(1)
    on_blank, on_label = gather(last, 1, 2 * end), gather(last, 1, maximum(2 * end - 1, 0))
    ends = cat([on_blank, where(end > 0, on_label, NOTHING)], 1)
    losses = -logsumexp(ends, 1)
    impossible = losses > -0.5 * NOTHING
    losses = where(impossible, 0.0 if zero_infinity else np.inf, losses)
    losses = where(steps > x.shape[0], np.nan, losses)  # an input length above T, for which PyTorch raises an error
    if reduction == "mean":
        losses = losses / cast(maximum(lengths, 1), x.dtype)
    return cast(reduced(losses, reduction), kind)


def _states(labels: Tensor, lengths: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """Return the class of each alignment state, blank, label, blank, …, label, blank ``[N, 2S+1]``, and a mask of the
    states whose preceding blank a path may skip.
    """
    rows, most = labels.shape
    labels = where(arange(most) < lengths.unsqueeze(1), labels, blank)
    blanks = full((rows, 1), blank, "int64")
    pairs = stack([blanks.expand(rows, most), labels], -1).reshape(rows, 2 * most)
    states = cat([pairs, blanks], 1)
    before = cat([full((rows, 2), blank, "int64"), states], 1)[:, : 2 * most + 1]
    return states, logical_and(states != blank, states != before)


def _last(x: Tensor, states: Tensor, may_skip: Tensor, steps: Tensor) -> Tensor:
    """Return the log of the total probability of all paths to each state at the end of each row: ``[N, 2S+1]``."""
    length, rows, _ = x.shape
    count = states.shape[1]
    emitted = gather(x, 2, states.unsqueeze(0).expand(length, rows, count))
    runs = (arange(length).unsqueeze(1) < steps.unsqueeze(0)).unsqueeze(-1)
    start = where(arange(count) == 0, tensor(0.0, x.dtype), NOTHING).unsqueeze(0).expand(rows, count)
    nothing = full((rows, 2), NOTHING, x.dtype)
    builder = current().builder

    def step(before: Var, score: Var, is_running: Var) -> list[Var]:
        from_before = builder.Concat(nothing.traced, before, axis=1)
        one, two = (builder.Slice(from_before, [2 - n], [-n], [1]) for n in (1, 2))
        ways = [before, one, builder.Where(may_skip.traced, two, NOTHING)]
        ways = [builder.Unsqueeze(way, [2]) for way in ways]
        after = builder.ReduceLogSumExp(builder.Concat(*ways, axis=2), [2], keepdims=0) + score
        return [builder.Where(is_running, after, before)]

    return scanned(step, [start], [emitted, runs])[0]


# --- names -----------------------------------------------------------------------------------------------


def _ctc(
    scores: TensorLike,
    targets: TensorLike,
    input_lengths: TensorLike,
    target_lengths: TensorLike,
    blank: int = 0,
    batch_first: bool = False,
    zero_infinity: bool = False,
    reduction: str = "mean",
) -> Tensor:
    x = real(scores)
    log_p = op.LogSoftmax(x.transpose(0, 1) if batch_first else x, axis=2)  # does not change log-probabilities
    return ctc_loss(log_p, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)


def _spelt(
    scores: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    batch_first: bool,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """Return the greedily decoded labels and the true labels, ``[rows, times]``, padded with −1."""
    classes = op.ArgMax(scores, axis=2, keepdims=0)
    classes = classes if batch_first else classes.transpose(0, 1)
    before = cat([full((classes.shape[0], 1), -1, "int64"), classes[:, :-1]], 1)
    runs = arange(classes.shape[1]) < input_lengths.unsqueeze(1)
    said = logical_and(runs, logical_and(classes != blank, classes != before))
    there = arange(targets.shape[1]) < target_lengths.unsqueeze(1)
    return where(said, classes, -1), where(there, targets, -1)


def _targets(arguments: Mapping[str, Any]) -> tuple[Target, ...]:
    at = 0 if arguments["batch_first"] else 1

    def last_class(shape: Shape) -> int | str:
        return shape[2] - 1 if isinstance(shape[2], int) else "classes"

    def spec(most: Callable[[Shape], int | str | None], *rest: str, **more: Any) -> Any:
        def found(outputs: Sequence[Var]) -> Spec:
            shape = outputs[0].shape or (None,) * outputs[0].rank
            if len(shape) != 3:
                raise BuildError(
                    f"ctc expects scores of steps, rows and classes, but the model's output has shape {list(shape)}"
                )
            axes = (at, *(None for _ in rest))
            return Spec(ir.DataType.INT64, (shape[at], *rest), axes, most=most(shape), **more)

        return found

    return (
        Target("target", "class indices (int64) `[N, S]`", spec(last_class, "labels", counted_by="target_lengths")),
        Target("input_lengths", "int64 `[N]`", spec(lambda shape: shape[1 - at] or "steps")),
        Target("target_lengths", "int64 `[N]`", spec(lambda shape: "labels")),
    )


def _check_blank(arguments: Mapping[str, Any]) -> None:
    if arguments["blank"] < 0:
        raise BuildError(f"the blank of ctc must be a class index, but is {arguments['blank']}")


_ctc.__doc__ = """``−log Σ p(path)`` over all paths that spell the labels, divided by their number (``F.ctc_loss``).

The model gives scores or log-probabilities ``[T, N, C]``; ``batch_first`` takes ``[N, T, C]``.
"""
_LENGTHS = {
    "inf": "a row has more labels than the model's output has steps for: give it fewer, or set zero_infinity",
    "nan": "check whether an input length exceeds the steps of the model's output, or lower the learning rate",
}
named("ctc", _ctc, "blank batch_first zero_infinity reduction", _targets, activation="Softmax", spelt=_spelt,
      check=_check_blank, remedies=_LENGTHS)  # fmt: skip

"""Distillation loss: ``(1 − α)·loss + α·T²·KL(teacher ‖ student)``, plus matching of hidden states.

α is the teacher's share and T the temperature. Positions that the loss ignores (by label, mask or sample weight) are
also ignored in the divergence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.building.outputs import floating_outputs, output_of
from gradgraph.building.terms import Term, aligned
from gradgraph.data.record.specs import TargetSpec
from gradgraph.errors import BuildError, listed, shown
from gradgraph.files.model_metadata import Imitation
from gradgraph.frontend import reductions
from gradgraph.frontend.activations import log_softmax, softmax
from gradgraph.frontend.pointwise import cast
from gradgraph.frontend.reductions import mean
from gradgraph.frontend.tensor import Tensor
from gradgraph.frontend.trace import op, tensor, wrap
from gradgraph.graph.builder import Builder


def imitated(
    imitation: Imitation,
    builder: Builder,
    graph: ir.Graph,
    terms: Sequence[Term],
    factors: Sequence[TargetSpec],
    checked: Collection[str],
) -> list[tuple[Tensor, Tensor, float]]:
    """Return the terms of the distillation loss of a batch: the divergence from the teacher, then hidden-state losses.

    Args:
        imitation: the teacher's outputs and the options of the distillation.
        graph: the graph of the student, which contains the teacher.
        terms: the terms of the loss on labels.
        factors: the inputs that weight positions: sample weights and masks.
        checked: symbolic sizes that are compared before the graph runs (see ``same_sizes``).

    Returns:
        For each term its numerator, its denominator and its factor: the loss is the sum of
        ``factor · numerator / denominator``.
    """
    (student, teacher), *others = [
        [wrap(builder.wrap(output_of(graph, name))) for name in pair] for pair in imitation.pairs
    ]
    on_classes = next((t for t in terms if t.loss.labels and imitation.pairs[0][0] in t.outputs), None)
    axis = -1 if on_classes is None else on_classes.loss.axis
    t = imitation.temperature
    p = softmax(cast(teacher, "float32") / t, axis)
    gap = log_softmax(cast(teacher, "float32") / t, axis) - log_softmax(cast(student, "float32") / t, axis)
    values = {v.name: wrap(builder.wrap(v)) for v in graph.inputs if v.name}
    given = [values[spec.name] for spec in factors]
    ignoring = [s for s in on_classes.targets[:1] if s.ignore_index is not None] if on_classes else []
    labels = [values[spec.name] for spec in ignoring]
    counted = [op.Not(op.Equal(x, spec.ignore_index)) for x, spec in zip(labels, ignoring, strict=True)]
    above, below = _mean_parts(reductions.sum(p * gap, axis) * (t * t), [*given, *counted], checked)
    quotients = [(above, below, 1.0)]
    for mine, its in others:
        gap = cast(mine, "float32") - cast(its, "float32")
        found = [c for x, c in zip(labels, counted, strict=True) if _has_axes_of(mine, x)]
        _check_lies_over(given, mine)
        squares, count = _mean_parts(gap * gap, [*given, *found], checked)
        quotients.append((squares, count, imitation.match_weight))
    return quotients


def _mean_parts(each: Tensor, factors: Sequence[Tensor], checked: Collection[str]) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of ``each``, and the sum of the weights.

    The weights are the product of ``factors``, whose axes are the leading axes of ``each``.
    """
    depth = max((f.ndim for f in factors), default=0)
    if factors and each.ndim > depth:
        each = mean(each, list(range(depth, each.ndim)))
    weight = op.Expand(tensor(1.0), op.Shape(each))
    for factor in factors:
        weight = weight * aligned(factor, each, checked)
    below = reductions.sum(weight)
    above = reductions.sum(op.Where(weight == 0.0, 0.0, each * weight))  # not times 0: ignored entries may be infinite
    return above, op.Where(below == 0.0, 1.0, below)


def _has_axes_of(state: Tensor, labels: Tensor) -> bool:
    """Whether the leading axes of the hidden states are known to equal those of the labels."""
    mine, its = state.traced.shape, labels.traced.shape
    if mine is None or its is None or len(its) > len(mine):
        return False
    return all(a is not None and a == b for a, b in zip(mine, its, strict=False))


def _check_lies_over(factors: Sequence[Tensor], state: Tensor) -> None:
    """Raise BuildError unless the axes of each sample weight or mask in ``factors`` are leading axes of ``state``."""
    for factor in factors:
        mine, its = state.traced.shape or (), factor.traced.shape or ()
        unlike = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(mine, its, strict=False))
        if unlike or factor.ndim > state.ndim:
            name = shown(factor.traced.value.name)
            raise BuildError(
                f"the weights '{name}' of shape {_shape_text(its)} cannot be applied to the matched hidden state "
                f"'{shown(state.traced.value.name)}' of shape {_shape_text(mine)}, whose leading axes differ; match a "
                f"value with the axes of '{name}', or give '{name}' fewer axes"
            )


def _shape_text(shape: Sequence[Any]) -> str:
    return f"[{', '.join('?' if d is None else str(d) for d in shape)}]"


def check_imitation(graph: ir.Graph, imitation: Imitation, is_alone: bool, mask: Any) -> None:
    """Raise BuildError if the distillation does not match the other options.

    Errors are missing outputs of the teacher, a teacher's share below 1 although there is no other loss (``is_alone``),
    and a dict of masks for single outputs.
    """
    if missing := [name for name in imitation.values if name not in floating_outputs(graph)]:
        raise BuildError(
            f"the model lacks the floating-point outputs {listed(missing, 3)}, which the distillation loss reads; "
            "pass the model that distill returned, unchanged"
        )
    if isinstance(mask, Mapping):
        raise BuildError(
            "a mask of a single output does not apply to the distillation loss",
            remedy="pass mask=True, which masks every term",
            shell="use --mask, which masks every term, instead of --mask-of",
        )
    if is_alone and imitation.alpha < 1.0:
        raise BuildError(
            f"the teacher's share of the loss is {imitation.alpha}, but there is no other loss for the rest",
            remedy="pass a loss, or train on the teacher alone: gg.distill(..., alpha=1)",
            shell="add --loss, or train on the teacher alone: --teacher-share 1",
        )

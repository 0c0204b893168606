"""Forms and rewrites for IREE."""

from __future__ import annotations

from typing import Any

from gradgraph.backends.backend import Lowering
from gradgraph.backends.capability import lacking
from gradgraph.backends.forms import Forms
from gradgraph.backends.shared_forms import TRAINING
from gradgraph.backends.shared_rewrites import LAST, NARROW_NUMBERS, TURN_SCANS
from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.registry import case, real

FORMS = Forms(TRAINING)


@FORMS.add(
    "ConvTranspose",
    case(real(2, 3, 4), real(3, 1, 2), group=3),
    case(
        real(2, 3, 4, 4), real(3, 1, 3, 3), real(3), group=3, strides=[2, 2], output_padding=[1, 1], pads=[1, 1, 1, 1]
    ),
    when=lacking("iree"),
)
def transposed_by_two_filters(
    op: Builder, x: Var, w: Var, bias: Var | None = None, *, group: int = 1, **attrs: Any
) -> Var | None:
    """Write a depthwise ConvTranspose with two filters per channel, as IREE does not support one filter.

    The second filter is zero, and its output is dropped. ``x`` is [N, C, …], ``w`` [C, 1, …]. None unless depthwise
    with at least two channels.
    """
    if group == 1 or w.shape is None or w.shape[:2] != (group, 1):
        return None
    both = op.ConvTranspose(x, op.Concat(w, w * 0.0, axis=1), group=group, **attrs)
    y = op.Slice(both, [0], [-LAST], [1], [2])
    return y if bias is None else y + op.Unsqueeze(bias, [*range(1, len(w.shape) - 1)])


LOWERING = Lowering(forms=FORMS, after=(NARROW_NUMBERS, TURN_SCANS))

"""onnxruntime-web's providers for WebGPU, which have no float64 and no BatchNormalization in training mode.

Seen with onnxruntime-web 1.30: convolutions of 6, 9, 15, … channels into a multiple of 4 give wrong numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradgraph.backends.backend import Backend
from gradgraph.backends.forms import Call, Forms
from gradgraph.backends.shared_forms import TRAINING_NORMS, compared_winners, written_out_batch_norm
from gradgraph.backends.shared_rewrites import NARROW_NUMBERS
from gradgraph.builder import Builder, Var
from gradgraph.registry import case, real

FORMS = Forms()
FORMS.add("MaxPoolGrad")(compared_winners)
FORMS.add("BatchNormalization", *TRAINING_NORMS, domain="")(written_out_batch_norm)


def _is_summed_in_threes(call: Call) -> bool:
    """Does the kernel add up channels in threes, where its tiles hold fours? It does that right for 3 of them."""
    w = call.shape(1)
    if w is None or call.attrs.get("group", 1) != 1:
        return False
    into, channels = w[:2]
    if not isinstance(into, int) or not isinstance(channels, int):
        return False
    return channels > 3 and channels % 3 == 0 and channels % 4 > 0 and into % 4 == 0


@FORMS.add(
    "Conv",
    case(real(2, 6, 5, 5), real(4, 6, 3, 3), real(4), pads=[1, 1, 1, 1]),
    case(real(1, 9, 4), real(8, 9, 2)),
    domain="",
    when=_is_summed_in_threes,
)
def with_channels_of_zeros(op: Builder, x: Var, w: Var, b: Var | None = None, **attrs: Any) -> Var | None:
    """Channels of zeros up to a multiple of 4."""
    channels = None if w.shape is None else w.shape[1]
    if not isinstance(channels, int) or channels % 4 == 0:
        return None
    ends = op.const(np.array([0, -channels % 4]))
    x, w = (op.Pad(v, ends, None, op.const(np.array([1]))) for v in (x, w))
    return op.Conv(x, w, b, **attrs)


WEB_GPU = Backend(
    name="web-gpu",
    about="standard nodes for WebGPU in browsers; what the provider lacks runs on the CPU",
    forms=FORMS,
    after=(NARROW_NUMBERS,),
)

"""OpenVINO: other forms for what its ONNX frontend has no rule for.

Its CPU plugin computes float64 as float32 and integers of 32 and 64 bits as such of 31 bits or as float32, without a
word; and it refuses loops whose bodies read outer values, and convolutions of open sizes whose weights are computed.
"""

from __future__ import annotations

from gradgraph.backends.backend import Backend
from gradgraph.backends.forms import Forms
from gradgraph.backends.shared_forms import scattered_winners
from gradgraph.backends.shared_rewrites import CLOSE_SCANS, NARROW_NUMBERS, TURN_SCANS
from gradgraph.rules.registry import case, real

FORMS = Forms()
FORMS.add(
    "MaxUnpool",
    case(real(1, 2, 2, 2), [[[[5, 7], [13, 10]], [[16, 19], [25, 31]]]], kernel_shape=[2, 2], strides=[2, 2]),
    domain="",
)(scattered_winners)

OPENVINO = Backend(
    name="openvino",
    about="standard nodes without the operators that OpenVINO lacks",
    forms=FORMS,
    after=(NARROW_NUMBERS, TURN_SCANS, CLOSE_SCANS),
)

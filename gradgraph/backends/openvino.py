"""OpenVINO: other forms for what its ONNX frontend has no rule for.

Seen with OpenVINO 2026.4: it runs whole steps of convolutional networks and transformers, and refuses loops whose
bodies read outer values, which gradients of recurrent layers have.
"""

from __future__ import annotations

from gradgraph.backends.backend import Backend
from gradgraph.backends.forms import Forms
from gradgraph.backends.shared_forms import scattered_winners
from gradgraph.registry import case, real

FORMS = Forms()
FORMS.add(
    "MaxUnpool",
    case(real(1, 2, 2, 2), [[[[5, 7], [13, 10]], [[16, 19], [25, 31]]]], kernel_shape=[2, 2], strides=[2, 2]),
    domain="",
)(scattered_winners)

OPENVINO = Backend(name="openvino", about="standard nodes without the operators that OpenVINO lacks", forms=FORMS)

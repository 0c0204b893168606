"""OpenVINO: other forms for what its ONNX frontend has no rule for.

Its CPU plugin computes float64 as float32 and integers of 32 and 64 bits as such of 31 bits or as float32, without a
word; and it refuses loops whose bodies read outer values, and convolutions of open sizes whose weights are computed.
Of two outputs that are one constant it loses one.
"""

from __future__ import annotations

from gradgraph.backends.backend import Backend, Lowering


def _lowering() -> Lowering:
    from gradgraph.backends.shared_forms import UNPOOLING
    from gradgraph.backends.shared_rewrites import CLOSE_SCANS, NARROW_NUMBERS, PART_OUTPUTS, TURN_SCANS

    return Lowering(forms=UNPOOLING, after=(NARROW_NUMBERS, TURN_SCANS, CLOSE_SCANS), last=(PART_OUTPUTS,))


OPENVINO = Backend(name="openvino", about="standard nodes without the operators that OpenVINO lacks", load=_lowering)

"""The backend ``openvino``: replacements for operators that OpenVINO's ONNX frontend does not support.

OpenVINO's CPU plugin silently computes float64 as float32, and integers of 32 and 64 bits with 31 bits or as float32.
It rejects loops whose bodies read outer values, and convolutions of unknown sizes with computed weights. If two outputs
are the same constant, it loses one of them.
"""

from __future__ import annotations

from gradgraph.backends.backend import Backend, Lowering


def _lowering() -> Lowering:
    from gradgraph.backends.shared_forms import UNPOOLING
    from gradgraph.backends.shared_rewrites import CLOSE_SCANS, NARROW_NUMBERS, PART_OUTPUTS, TURN_SCANS

    return Lowering(forms=UNPOOLING, after=(NARROW_NUMBERS, TURN_SCANS, CLOSE_SCANS), last=(PART_OUTPUTS,))


OPENVINO = Backend(name="openvino", about="standard nodes without the operators that OpenVINO lacks", load=_lowering)

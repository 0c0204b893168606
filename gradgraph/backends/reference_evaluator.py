"""The backend ``reference-evaluator``: onnx's ReferenceEvaluator, in NumPy, which does not support Scans in reverse."""

from __future__ import annotations

from gradgraph.backends.backend import Backend, Lowering


def _lowering() -> Lowering:
    from gradgraph.backends.shared_rewrites import TURN_SCANS

    return Lowering(after=(TURN_SCANS,))


REFERENCE_EVALUATOR = Backend(
    name="reference-evaluator",
    about="standard nodes for onnx's ReferenceEvaluator, to inspect every value",
    load=_lowering,
)

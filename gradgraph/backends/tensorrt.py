"""The backend ``tensorrt``: TensorRT, through onnxruntime's provider or standalone, by its ONNX parser's documentation.

We have not run it. onnxruntime computes nodes that the provider does not support on CUDA or the CPU, so a file for this
backend runs everywhere. Each switch between providers costs a copy; the forms avoid some of them: TensorRT has no
float64, no indices of maxima and no statistics of norms.
"""

from __future__ import annotations

from gradgraph.backends.backend import Backend, Lowering


def _lowering() -> Lowering:
    from gradgraph.backends.shared_forms import TRAINING_WITH_STATISTICS
    from gradgraph.backends.shared_rewrites import NARROW_NUMBERS

    return Lowering(forms=TRAINING_WITH_STATISTICS, after=(NARROW_NUMBERS,))


TENSORRT = Backend(
    name="tensorrt",
    about="standard nodes in the forms that TensorRT's ONNX parser supports (from its documentation; not run by us)",
    provider="TensorrtExecutionProvider",
    load=_lowering,
)

"""TensorRT, behind onnxruntime's TensorRT provider or alone: from the documents of its ONNX parser, not run by us.

onnxruntime computes nodes that the provider does not take on CUDA or the CPU, so a file for this backend runs
everywhere. Each change of side costs a copy; its forms avoid some: it has no float64, gives no positions of a pool's
maxima and no statistics of a norm.
"""

from __future__ import annotations

from gradgraph.backends.backend import Backend, Lowering


def _lowering() -> Lowering:
    from gradgraph.backends.shared_forms import TRAINING_WITH_STATISTICS
    from gradgraph.backends.shared_rewrites import NARROW_NUMBERS

    return Lowering(forms=TRAINING_WITH_STATISTICS, after=(NARROW_NUMBERS,))


TENSORRT = Backend(
    name="tensorrt",
    about="standard nodes in the forms that TensorRT's ONNX parser takes (from its documents; not run by us)",
    provider="TensorrtExecutionProvider",
    load=_lowering,
)

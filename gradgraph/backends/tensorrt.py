"""TensorRT, behind onnxruntime's TensorRT provider or alone: from the documents of its ONNX parser, not run by us.

onnxruntime computes nodes that the provider does not take on CUDA or the CPU, so a file for this backend runs
everywhere. Each change of side costs a copy; the forms below avoid some: it has no float64, gives no positions of a
pool's maxima and no statistics of a norm.
"""

from __future__ import annotations

from gradgraph.backends.backend import Backend
from gradgraph.backends.forms import Forms
from gradgraph.backends.shared_forms import (
    STATISTICS,
    TRAINING_NORMS,
    compared_winners,
    reads_statistics,
    written_out_batch_norm,
    written_out_layer_norm,
)
from gradgraph.backends.shared_rewrites import NARROW_NUMBERS

FORMS = Forms()
FORMS.add("MaxPoolGrad")(compared_winners)
FORMS.add("BatchNormalization", *TRAINING_NORMS, domain="")(written_out_batch_norm)
FORMS.add("LayerNormalization", *STATISTICS, domain="", when=reads_statistics)(written_out_layer_norm)

TENSORRT = Backend(
    name="tensorrt",
    about="standard nodes in the forms that TensorRT's ONNX parser takes (from its documents; not run by us)",
    provider="TensorrtExecutionProvider",
    forms=FORMS,
    after=(NARROW_NUMBERS,),
)

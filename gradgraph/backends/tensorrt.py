"""TensorRT, behind onnxruntime's TensorRT provider or alone: from the documents of its ONNX parser, not run by us.

onnxruntime computes nodes that the provider does not take on CUDA or the CPU, so a file for this backend runs
everywhere.
"""

from __future__ import annotations

from gradgraph.backends.backend import Backend

TENSORRT = Backend(
    name="tensorrt",
    about="standard nodes in the forms that TensorRT's ONNX parser takes (from its documents; not run by us)",
    provider="TensorrtExecutionProvider",
)

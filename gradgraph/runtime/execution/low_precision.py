"""Warnings, before the first step, about mixed precision on execution providers without suitable kernels."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from gradgraph.backends.ort_cuda.cuda_kernels import without_kernel
from gradgraph.errors import listed

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def lacks(precision: str | None, provider: str | None) -> str:
    """Return a warning that a step in low ``precision`` is not faster than in float32, or "".

    ``provider`` is the backend's onnxruntime provider; None if unknown.
    """
    if precision is None or (precision == "float16" and provider == CUDA):
        return ""
    if precision == "bfloat16":
        where = {CPU: "its CPU provider", CUDA: "its CUDA provider"}.get(provider or "", "this provider")
        return (
            f"onnxruntime has few bfloat16 kernels, so {where} computes in float32 and rounds: the results have the "
            "precision of bfloat16, but a step takes longer than in float32"
        )
    if provider == CPU:
        return (
            "onnxruntime's CPU provider has no kernels for float16 matrix products, so it computes in float32 and "
            "rounds: the results have the precision of float16, but a step takes longer than in float32"
        )
    return "gradgraph does not know which float16 kernels this provider has; nodes without a kernel run on the CPU"


def on_the_cpu(model: onnx.ModelProto) -> str:
    """Return a warning about nodes of a lowered step that run on the CPU for lack of a CUDA kernel; "" if none do."""
    strays = without_kernel(ir.from_proto(model))
    if not strays:
        return ""
    operators = listed(dict.fromkeys(stray.operator for stray in strays))
    return (
        f"onnxruntime's CUDA provider has no kernel for {len(strays)} nodes of the step ({operators}), which run on "
        "the CPU, with one transfer each; Precision(float32=[...]) keeps operators in float32"
    )

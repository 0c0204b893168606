"""Warnings about mixed precision before the first step: what the execution provider lacks."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from gradgraph.backends.ort_cuda.cuda_kernels import without_kernel
from gradgraph.errors import listed

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def lacks(precision: str | None, provider: str | None) -> str:
    """Explain why ``precision`` is no faster than float32 on ``provider``; empty if it may be.

    Args:
        precision: of the step; None for float32.
        provider: onnxruntime's provider of a backend; None if unknown.
    """
    if precision is None or (precision == "float16" and provider == CUDA):
        return ""
    if precision == "bfloat16":
        where = {CPU: "its CPU provider", CUDA: "its CUDA provider"}.get(provider or "", "this provider")
        return (
            "bfloat16 is computed in float32 and rounded, as onnxruntime has few kernels for it: on "
            f"{where} the numbers are those of bfloat16, and a step takes longer than in float32"
        )
    if provider == CPU:
        return (
            "onnxruntime's CPU provider has no kernels for products in float16: they are computed in float32 and "
            "rounded, so the numbers are those of float16, and a step takes longer than in float32"
        )
    return "we do not know which kernels for float16 this provider has; without one, nodes run on the CPU"


def on_the_cpu(model: onnx.ModelProto) -> str:
    """Describe operators of a lowered step without a CUDA kernel; empty if all have one."""
    strays = without_kernel(ir.from_proto(model))
    if not strays:
        return ""
    operators = listed(dict.fromkeys(stray.operator for stray in strays))
    return (
        f"onnxruntime's CUDA provider has no kernel for {len(strays)} nodes of the step ({operators}), which run on "
        "the CPU, one transfer each; Precision(float32=[...]) keeps operators in float32"
    )

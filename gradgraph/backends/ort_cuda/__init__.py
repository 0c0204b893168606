"""onnxruntime's CUDA provider: what has no CUDA kernel is written with what has one."""

from __future__ import annotations

from gradgraph.backends.backend import Backend, Lowering


def _lowering() -> Lowering:
    from gradgraph.backends.ort_cuda.lowering import LOWERING

    return LOWERING


ORT_CUDA = Backend(
    name="ort-cuda",
    about="lowered now, for onnxruntime on CUDA",
    provider="CUDAExecutionProvider",
    only_there=True,
    load=_lowering,
)

"""onnxruntime's CUDA provider: what has no CUDA kernel is written with what has one."""

from __future__ import annotations

from gradgraph.backends.backend import Backend
from gradgraph.backends.ort_cuda import cuda_forms, cuda_formulas  # noqa: F401  (they fill the table)
from gradgraph.backends.ort_cuda.cuda_kernels import on_host
from gradgraph.backends.ort_cuda.cuda_table import FORMS

ORT_CUDA = Backend(
    name="ort-cuda",
    about="lowered now, for onnxruntime on CUDA",
    provider="CUDAExecutionProvider",
    only_there=True,
    forms=FORMS,
    on_host=on_host,
)

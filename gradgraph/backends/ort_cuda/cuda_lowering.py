"""The lowering for onnxruntime's CUDA provider."""

from gradgraph.backends.backend import Lowering
from gradgraph.backends.ort_cuda import cuda_forms, cuda_formulas  # noqa: F401  (they fill the table)
from gradgraph.backends.ort_cuda.cuda_kernels import on_host
from gradgraph.backends.ort_cuda.cuda_table import FORMS

LOWERING = Lowering(forms=FORMS, on_host=on_host)

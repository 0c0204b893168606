"""The backend ``ort-cuda``: onnxruntime's CUDA provider; operators without a CUDA kernel are replaced by others."""

from gradgraph.backends.backend import Backend, lowering_in

ORT_CUDA = Backend(
    name="ort-cuda",
    about="lowered now, for onnxruntime on CUDA",
    provider="CUDAExecutionProvider",
    only_there=True,
    load=lowering_in(f"{__name__}.cuda_lowering"),
)

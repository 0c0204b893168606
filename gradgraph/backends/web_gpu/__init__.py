"""The backend ``web-gpu``: onnxruntime-web's WebGPU providers.

They lack float64 and BatchNormalization in training mode. With onnxruntime-web 1.30, convolutions from 6, 9, 15, …
channels to a multiple of 4 return wrong results.
"""

from gradgraph.backends.backend import Backend, lowering_in

WEB_GPU = Backend(
    name="web-gpu",
    about="standard nodes for WebGPU in browsers; unsupported ones run on the CPU",
    load=lowering_in(f"{__name__}.web_gpu_lowering"),
)

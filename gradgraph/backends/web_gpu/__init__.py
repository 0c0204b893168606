"""onnxruntime-web's providers for WebGPU, which have no float64 and no BatchNormalization in training mode.

Seen with onnxruntime-web 1.30: convolutions of 6, 9, 15, … channels into a multiple of 4 give wrong numbers.
"""

from __future__ import annotations

from gradgraph.backends.backend import Backend, lowering_in

WEB_GPU = Backend(
    name="web-gpu",
    about="standard nodes for WebGPU in browsers; what the provider lacks runs on the CPU",
    load=lowering_in(f"{__name__}.web_gpu_lowering"),
)

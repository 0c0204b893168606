"""Networks written in Python and exported to ONNX.

``nn`` and ``functional`` have the names and arguments of PyTorch. ``export`` traces a network into an ONNX model whose
parameters are named initializers; ``from_torch`` exports a PyTorch module in this way (and imports PyTorch only when it
is called). ``from_onnx`` turns an ONNX model into a module that can be part of a network.
"""

from gradgraph.frontend import functional, init, nn
from gradgraph.frontend.dims import Dim
from gradgraph.frontend.gradients import detach, grad, jvp, stop_gradient, vjp
from gradgraph.frontend.init import manual_seed
from gradgraph.frontend.lowering import Input, export
from gradgraph.frontend.module import Buffer, Module, Parameter, Sequential
from gradgraph.frontend.onnx_import import from_onnx
from gradgraph.frontend.tensor import Tensor
from gradgraph.frontend.torch_import import from_torch
from gradgraph.frontend.trace import tensor

__all__ = [
    "Buffer",
    "Dim",
    "Input",
    "Module",
    "Parameter",
    "Sequential",
    "Tensor",
    "detach",
    "export",
    "from_onnx",
    "from_torch",
    "functional",
    "grad",
    "init",
    "jvp",
    "manual_seed",
    "nn",
    "stop_gradient",
    "tensor",
    "vjp",
]


def __dir__() -> list[str]:
    return sorted(__all__)

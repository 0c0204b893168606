"""The float64 oracle: onnx's ReferenceEvaluator, with its single-precision kernels replaced.

onnxruntime has no float64 kernel for convolution, pooling, Erf and many more, so central differences are taken here.
Some reference kernels compute in float32 inside and return float64 without a word; those that matter are repaired.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from gradgraph.verify import (
    kernels_control,
    kernels_conv,
    kernels_elementwise,
    kernels_indexing,
    kernels_norm,
    kernels_recurrent,
    kernels_spatial,
)


class Erf(OpRun):  # type: ignore[misc]
    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype),)


class Gelu(OpRun):  # type: ignore[misc]
    op_domain = ""

    def _run(self, x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
        if approximate == "tanh":
            y = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        else:
            y = 0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))
        return (y.astype(x.dtype),)


REPAIRED: Sequence[type[OpRun]] = (
    Erf,
    Gelu,
    *kernels_control.KERNELS,
    *kernels_conv.KERNELS,
    *kernels_elementwise.KERNELS,
    *kernels_indexing.KERNELS,
    *kernels_norm.KERNELS,
    *kernels_recurrent.KERNELS,
    *kernels_spatial.KERNELS,
)

_ADDED: dict[tuple[str, str], type[OpRun]] = {}


def use_kernel(kernel: type[OpRun]) -> None:
    """Let the oracle compute an operator, that of the kernel's name and ``op_domain``, with ``kernel``."""
    _ADDED[kernel.op_domain, kernel.__name__] = kernel


class Oracle:
    """Runs a model in the ReferenceEvaluator; ``oracle(x=..., y=...)`` returns its outputs by name."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.outputs = [o.name for o in model.graph.output]
        self._run = ReferenceEvaluator(model, new_ops=[*REPAIRED, *_ADDED.values()])

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with np.errstate(all="ignore"):
            results = self._run.run(None, dict(feeds))
        return dict(zip(self.outputs, map(np.asarray, results), strict=True))


@functools.cache
def _float_types() -> frozenset[int]:
    return frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})


def in_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose float16, bfloat16 and float32 tensors, inputs, outputs, casts and constants are float64."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    _widen_graph(wide.graph)
    for function in wide.functions:
        _widen_nodes(function.node)
    return wide


def _widen_graph(graph: onnx.GraphProto) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type in _float_types():
            value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    _widen_nodes(graph.node)


def _widen_nodes(nodes: Any) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _widen_graph(attribute.g)
            elif attribute.name in ("to", "dtype") and attribute.i in _float_types():
                attribute.i = onnx.TensorProto.DOUBLE
        if node.op_type == "Constant":
            _widen_constant(node)


def _widen_constant(node: onnx.NodeProto) -> None:
    """Constant's value_float and value_floats are float32 by definition: written as a tensor instead."""
    for attribute in list(node.attribute):
        if attribute.name in ("value_float", "value_floats"):
            data = np.array(onnx.helper.get_attribute_value(attribute), np.float64)
            node.attribute.remove(attribute)
            node.attribute.append(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(data)))


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in _float_types():
        wide = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
        tensor.CopyFrom(wide)

"""The float64 oracle: onnx's ReferenceEvaluator, with its single-precision kernels replaced.

onnxruntime has no float64 kernel for convolution, pooling, Erf and many more, so central differences are taken here.
Some reference kernels compute in float32 inside and return float64 without a word; those that matter are repaired.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from gradgraph.verify import (  # noqa: F401  (they fill the list of kernels)
    kernels_control,
    kernels_conv,
    kernels_elementwise,
    kernels_indexing,
    kernels_norm,
    kernels_recurrent,
    kernels_spatial,
)
from gradgraph.verify.kernel import KERNELS, Kernel


class Erf(Kernel):
    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype),)


class Gelu(Kernel):
    def _run(self, x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
        if approximate == "tanh":
            y = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        else:
            y = 0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))
        return (y.astype(x.dtype),)


_ADDED: dict[tuple[str, str], type[OpRun]] = {}


def use_kernel(kernel: type[OpRun]) -> None:
    """Let the oracle compute an operator, that of the kernel's name and ``op_domain``, with ``kernel``."""
    _ADDED[kernel.op_domain, kernel.__name__] = kernel


class Oracle:
    """Runs a model in the ReferenceEvaluator; ``oracle({"x": ..., "y": ...})`` returns its outputs by name.

    Tensors are arrays; a sequence is a list of arrays, an optional that is empty ``None``.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.outputs = [o.name for o in model.graph.output]
        self._run = ReferenceEvaluator(_all_named(model), new_ops=[*KERNELS, *_ADDED.values()])

    def __call__(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        with np.errstate(all="ignore"):
            results = self._run.run(None, dict(feeds))
        rows = zip(self.outputs, results, strict=True)
        return {name: y if y is None or isinstance(y, list) else np.asarray(y) for name, y in rows}


def _all_named(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model``, or a copy in which outputs that are left out have names.

    The ReferenceEvaluator keeps them under the name "", and gives them to the next node that leaves out an input.
    """
    if not any("" in node.output for node in _nodes(model)):
        return model
    named = onnx.ModelProto()
    named.CopyFrom(model)
    for i, node in enumerate(_nodes(named)):
        for k, name in enumerate(node.output):
            node.output[k] = name or f"left out/{i}/{k}"
    return named


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """All nodes, also those of bodies and functions."""
    waiting = [*model.graph.node, *(n for function in model.functions for n in function.node)]
    while waiting:
        node = waiting.pop()
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                waiting += graph.node


# --- the same model in another precision -----------------------------------------------------------------

_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")
_FLOATS = frozenset(
    {onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
)


def in_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose float16, bfloat16 and float32 tensors, inputs, outputs, casts and constants are float64."""
    return in_precision(model, onnx.TensorProto.DOUBLE)


def in_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose float16, bfloat16 and float64 tensors, inputs, outputs, casts and constants are float32."""
    return in_precision(model, onnx.TensorProto.FLOAT)


def in_precision(model: onnx.ModelProto, precision: int) -> onnx.ModelProto:
    """A copy in which every floating tensor has the element type ``precision``; 8-bit floats and smaller ones stay."""
    converted = onnx.ModelProto()
    converted.CopyFrom(model)
    _convert_graph(converted.graph, precision)
    for function in converted.functions:
        _convert_nodes(function.node, precision)
    return converted


def _convert_graph(graph: onnx.GraphProto, precision: int) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        _convert_type(value.type, precision)
    for tensor in graph.initializer:
        _convert_tensor(tensor, precision)
    _convert_nodes(graph.node, precision)


def _convert_type(kind: onnx.TypeProto, precision: int) -> None:
    """Change the floating type of a tensor, or of the tensors in a sequence or optional."""
    while (held := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = getattr(kind, held).elem_type
    if held == "tensor_type" and kind.tensor_type.elem_type in _FLOATS:
        kind.tensor_type.elem_type = precision


def _convert_nodes(nodes: Any, precision: int) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _convert_tensor(attribute.t, precision)
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _convert_graph(attribute.g, precision)
            elif attribute.name in _TYPE_ATTRIBUTES and attribute.i in _FLOATS:
                attribute.i = precision
        if node.op_type == "Constant":
            _write_as_tensor(node, precision)


def _write_as_tensor(node: onnx.NodeProto, precision: int) -> None:
    """Constant's value_float and value_floats are float32 by definition: written as a tensor instead."""
    for attribute in list(node.attribute):
        if attribute.name in ("value_float", "value_floats"):
            data = np.array(onnx.helper.get_attribute_value(attribute), np.float64)
            tensor = onnx.numpy_helper.from_array(data)
            _convert_tensor(tensor, precision)
            node.attribute.remove(attribute)
            node.attribute.append(onnx.helper.make_attribute("value", tensor))


def _convert_tensor(tensor: onnx.TensorProto, precision: int) -> None:
    if tensor.data_type in _FLOATS and tensor.data_type != precision:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(precision)
        array = onnx.numpy_helper.to_array(tensor).astype(dtype)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))

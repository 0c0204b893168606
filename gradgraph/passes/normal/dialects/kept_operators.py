"""Types and shapes of operators of com.microsoft that stay in the model, as onnxruntime infers them.

ONNX's inference covers its own operators only. A model of the one node is opened in onnxruntime, whose schemas infer
the outputs from the declared inputs. Nothing is computed, and weights are declared only, except small constants, which
may determine sizes.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from gradgraph.graph.checks import has_bodies
from gradgraph.graph.shapes import recorded_shape, shape_of_type

_SMALL = 64  # largest number of elements of a constant that is stored in the model of one node
_ELEMENT_TYPES = {
    "bool": ir.DataType.BOOL,
    "double": ir.DataType.DOUBLE,
    "float": ir.DataType.FLOAT,
    "bfloat16": ir.DataType.BFLOAT16,
    "float16": ir.DataType.FLOAT16,
    "string": ir.DataType.STRING,
    **{f"{sign}int{bits}": ir.DataType[f"{sign}int{bits}".upper()] for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


def infer_kept(node: ir.Node) -> bool:
    """Record missing types and shapes of the outputs of ``node``; return False if onnxruntime cannot tell them."""
    inputs = [v for v in node.inputs if v is not None]
    if has_bodies(node) or any(v.dtype is None for v in inputs):
        return False
    found = _in_onnxruntime(_model_of(node))
    for value in node.outputs:
        if value.name in found:
            dtype, dims = found[value.name]
            value.type = value.type or ir.TensorType(dtype)
            value.shape = value.shape or ir.Shape(dims)
    return bool(found)


def _model_of(node: ir.Node) -> onnx.ModelProto:
    proto = ir.to_proto(node)
    declared, stored, seen = [], [], set()
    for value in node.inputs:
        if value is None or value.name in seen:
            continue
        seen.add(value.name)
        tensor, dtype, shape = value.const_value, value.dtype, recorded_shape(value)
        assert dtype is not None  # checked by the caller
        if tensor is not None and tensor.size <= _SMALL and dtype.bitwidth >= 8:
            stored.append(numpy_helper.from_array(tensor.numpy(), value.name))
        else:
            sizes = list(tensor.shape.numpy()) if tensor is not None else shape
            declared.append(helper.make_tensor_value_info(value.name or "", dtype.value, sizes))
    outputs = [helper.make_value_info(v.name or "", onnx.TypeProto()) for v in node.outputs if v.name]
    graph = helper.make_graph([proto], "node", declared, outputs, stored)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(node.domain, 1)], ir_version=10
    )


def _in_onnxruntime(model: onnx.ModelProto) -> dict[str, tuple[ir.DataType, list[Any]]]:
    """Return the element type and sizes of each output, by name; empty if onnxruntime rejects the model."""
    import onnxruntime as ort  # here, because most models need no inference of this kind

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # onnxruntime's errors have no common base: no kernel, or inputs that it rejects
        return {}
    found = {}
    known = {d for i in model.graph.input for d in shape_of_type(i.type) or () if isinstance(d, str)}
    for output in session.get_outputs():
        dtype = _ELEMENT_TYPES.get(output.type.removeprefix("tensor(").removesuffix(")"))
        if dtype is not None:
            sizes = [d if isinstance(d, int) or d in known else None for d in output.shape]
            found[output.name] = (dtype, sizes)
    return found

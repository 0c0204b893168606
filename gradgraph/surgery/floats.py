"""Conversion of a float16 or bfloat16 model to float32 computation, with its weights stored as before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import PATH, checked
from gradgraph.files.model_metadata import adapter_weights
from gradgraph.files.models import Source
from gradgraph.surgery.operation import Path, Result, closed, free_name, opened, set_numbers

NARROW, WIDE = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16), ir.DataType.FLOAT


@checked(out=PATH.or_none())
def in_float32(model: Source, *, out: Path | None = None) -> Result:
    """Convert float16 and bfloat16 to float32: inputs, outputs, and the whole computation.

    Weights keep their names and stored type, and are followed by a Cast; adapters become float32, since they are
    trained.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        out: write the result to this path.

    Returns:
        A model of the same type as ``model``.

    Raises:
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    compute_in_float32(work)
    return closed(work, model, out)


def compute_in_float32(work: ir.Model) -> None:
    """Convert float16 and bfloat16 computation to float32, in place."""
    trained = set(adapter_weights(work.metadata_props))
    stored = [v for v in work.graph.initializers.values() if v.dtype in NARROW]
    graphs = [work.graph, *(f.graph for f in work.functions.values())]
    for node in [n for graph in graphs for n in ir.traversal.RecursiveGraphIterator(graph)]:
        _widen(node)
    for value in [v for graph in graphs for v in _values(graph)]:
        if value.dtype in NARROW and value.const_value is None:
            value.type = ir.TensorType(WIDE)
    for value in stored:
        if value.name in trained or value.is_graph_input() or not value.shape or len(value.shape) < 2:
            assert value.const_value is not None
            set_numbers(work, value, value.const_value.numpy().astype(np.float32))
            value.type = ir.TensorType(WIDE)
        else:
            _cast_behind(work, value)


def _widen(node: ir.Node) -> None:
    """Change a node's tensor and type attributes from float16 or bfloat16 to float32."""
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in NARROW:
            tensor = attribute.as_tensor()
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name))
        elif name in ("to", "dtype", "output_dtype") and attribute.type == ir.AttributeType.INT:
            node.attributes[name] = ir.AttrInt64(name, WIDE if attribute.as_int() in NARROW else attribute.as_int())


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in ir.traversal.RecursiveGraphIterator(graph):
        yield from node.outputs
        for attribute in node.attributes.values():
            bodies = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else []
            yield from (v for body in bodies for v in body.inputs)


def _cast_behind(work: ir.Model, value: ir.Value) -> None:
    name = free_name(work, f"{value.name}.float32")
    cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", WIDE)], name=name)
    cast.outputs[0].name, cast.outputs[0].type, cast.outputs[0].shape = name, ir.TensorType(WIDE), value.shape
    for reader, position in list(value.uses()):
        if reader is not cast:
            reader.replace_input_with(position, cast.outputs[0])
    work.graph.insert_before(work.graph[0], cast)

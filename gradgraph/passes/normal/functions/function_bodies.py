"""Operators that ONNX itself defines by a function body: replacing a node by it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import OPSET, as_dims, infer_beyond_onnx
from gradgraph.passes.normal.functions.inline import instantiate
from gradgraph.passes.normal.sizes.known_sizes import better


@functools.cache
def operators(opset: int) -> frozenset[str]:
    """The ai.onnx operators of an opset."""
    names = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == "" and s.since_version <= opset}
    return frozenset(n for n in names if not onnx.defs.get_schema(n, opset).deprecated)


def has_body(node: ir.Node, opset: int = OPSET) -> bool:
    """Does ONNX define this operator by a function body at that opset?"""
    return node.domain == "" and is_function(node.op_type, opset)


def is_function(op_type: str, opset: int = OPSET) -> bool:
    """Does ONNX define this operator of its own domain by a function body at that opset?"""
    if op_type not in operators(opset):
        return False
    schema = onnx.defs.get_schema(op_type, opset)
    return bool(schema.has_function or schema.has_context_dependent_function)


def _schema(node: ir.Node, opset: int) -> onnx.defs.OpSchema | None:
    if node.domain or node.op_type not in operators(opset):
        return None
    return onnx.defs.get_schema(node.op_type, opset)


def instantiate_body(op: Builder, node: ir.Node, opset: int = OPSET) -> tuple[Var | None, ...] | None:
    """Write the body of ``node`` with ``op`` and return its outputs; ``None`` if there is no body for it.

    The new nodes carry the body's own opset in ``Node.version``. Types of the inputs must be known, as the body may
    depend on them.
    """
    function = _function(node, opset)
    if function is None:
        return None
    defaults = _schema_defaults(node.op_type, opset)
    nodes, outputs = instantiate(
        function,
        node.inputs,
        {**defaults, **node.attributes},
        functools.partial(op.fresh_in, node.name or node.op_type),
    )
    version = function.opset_imports[""]
    for new in nodes:
        new.version = version
    infer_types(nodes, version)
    op.nodes.extend(nodes)
    results = dict(zip((v.name for v in function.outputs), outputs, strict=True))
    names = onnx.defs.get_schema(node.op_type, opset).outputs
    return tuple(None if (v := results.get(p.name)) is None else Var(op, v) for p in names[: len(node.outputs)])


def _function(node: ir.Node, opset: int) -> ir.Function | None:
    schema = _schema(node, opset)
    if schema is None:
        return None
    content = b""
    if schema.has_function:
        version = max(v for v in schema.function_opset_versions if v <= opset)
        content = schema.get_function_with_opset_version(version)
    elif schema.has_context_dependent_function:
        version = max(v for v in schema.context_dependent_function_opset_versions if v <= opset)
        content = schema.get_context_dependent_function_with_opset_version(
            version,
            _with_defaults(node, opset).SerializeToString(),
            [_type_of(v).SerializeToString() for v in node.inputs],
        )
    if not content:
        return None
    proto = onnx.FunctionProto.FromString(content)
    produced = {name for n in proto.node for name in n.output}
    proto.output[:] = [name for name in proto.output if name in produced]  # one that the node omits may not be
    function: ir.Function = ir.from_proto(proto)
    return function


def _with_defaults(node: ir.Node, opset: int) -> onnx.NodeProto:
    proto: onnx.NodeProto = ir.to_proto(node)
    proto.attribute.extend(
        ir.to_proto(a) for name, a in _schema_defaults(node.op_type, opset).items() if name not in node.attributes
    )
    return proto


@functools.cache
def _schema_defaults(op_type: str, opset: int) -> dict[str, ir.Attr]:
    attributes = onnx.defs.get_schema(op_type, opset).attributes
    return {n: ir.from_proto(a.default_value) for n, a in attributes.items() if a.default_value.name}


def _type_of(value: ir.Value | None) -> onnx.TypeProto:
    """The type of an input as protobuf; empty if the input is absent."""
    if value is None or value.type is None:
        return onnx.TypeProto()
    proto: onnx.TypeProto = ir.to_proto(value).type
    return proto


def _complete(value: ir.Value, found: ir.Shape | None) -> None:
    """Record ``found``, and keep sizes that were known beyond it."""
    if value.shape is None or (found is not None and len(found) != len(value.shape)):
        value.shape = found
    elif found is not None:
        old, new = as_dims(value.shape), as_dims(found)
        value.shape = ir.Shape([better(a, b) for a, b in zip(old, new, strict=True)])


def infer_types(nodes: Sequence[ir.Node], opset: int) -> None:
    """Record types and shapes of the outputs of ``nodes``, which stand in topological order."""
    imports = [onnx.helper.make_opsetid("", opset)]
    for node in nodes:
        schema = _schema(node, opset)
        if schema is None or any(v is not None and v.type is None for v in node.inputs):
            continue
        types = {v.name: _type_of(v) for v in node.inputs if v is not None and v.type is not None}
        data = {
            v.name: ir.to_proto(v.const_value)
            for v in node.inputs
            if v is not None and v.const_value is not None and v.const_value.size <= 64
        }
        try:
            found = onnx.shape_inference.infer_node_outputs(
                schema, ir.to_proto(node), types, data, opset_imports=imports
            )
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError):
            continue
        for value in node.outputs:
            if value.name in found:
                value.type = ir.serde.deserialize_type_proto_for_type(found[value.name])
                _complete(value, ir.serde.deserialize_type_proto_for_shape(found[value.name]))
        infer_beyond_onnx(node)

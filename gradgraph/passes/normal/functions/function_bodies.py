"""Expand operators that ONNX defines by a function body."""

from __future__ import annotations

import functools

import onnx
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.schemas import Schema, default_attributes, schema_of
from gradgraph.graph.shape_inference import infer_nodes
from gradgraph.graph.shapes import OPSET
from gradgraph.passes.normal.functions.inline import instantiate


@functools.cache
def operators(opset: int) -> frozenset[str]:
    """Return the names of the ai.onnx operators of an opset."""
    names = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == "" and s.since_version <= opset}
    return frozenset(n for n in names if not onnx.defs.get_schema(n, opset).deprecated)


def has_body(node: ir.Node) -> bool:
    """Whether ONNX defines the operator of ``node`` by a function body at opset 21."""
    return node.domain == "" and is_function(node.op_type)


def is_function(op_type: str, opset: int = OPSET) -> bool:
    """Whether ONNX defines the ai.onnx operator ``op_type`` by a function body at ``opset``."""
    schema = schema_of(op_type, opset)
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)


def instantiate_body(op: Builder, node: ir.Node, opset: int = OPSET) -> tuple[Var | None, ...] | None:
    """Write the body of ``node`` with ``op`` and return its outputs; ``None`` if there is no body for it.

    The new nodes have the body's own opset in ``Node.version``. The types of the inputs must be known, because the body
    may depend on them.
    """
    schema = None if node.domain else schema_of(node.op_type, opset)
    function = None if schema is None else _function(node, schema, opset)
    if schema is None or function is None:
        return None
    defaults = default_attributes(node.op_type, opset)
    nodes, outputs = instantiate(
        function,
        node.inputs,
        {**defaults, **node.attributes},
        functools.partial(op.fresh_in, node.name or node.op_type),
    )
    version = function.opset_imports[""]
    for new in nodes:
        new.version = version
    infer_nodes(nodes, version)
    op.nodes.extend(nodes)
    results = dict(zip((v.name for v in function.outputs), outputs, strict=True))
    return tuple(op.wrap(results.get(p.name)) for p in schema.outputs[: len(node.outputs)])


def _function(node: ir.Node, schema: Schema, opset: int) -> ir.Function | None:
    content = b""
    if schema.has_function:
        version = max(v for v in schema.function_opset_versions if v <= opset)
        content = schema.get_function_with_opset_version(version)
    elif schema.has_context_dependent_function:
        version = max(v for v in schema.context_dependent_function_opset_versions if v <= opset)
        types = (onnx.TypeProto() if v is None or v.type is None else ir.to_proto(v).type for v in node.inputs)
        content = schema.get_context_dependent_function_with_opset_version(
            version, _with_defaults(node, opset).SerializeToString(), [t.SerializeToString() for t in types]
        )
    if not content:
        return None
    proto = onnx.FunctionProto.FromString(content)
    produced = {name for n in proto.node for name in n.output}
    proto.output[:] = [name for name in proto.output if name in produced]  # without outputs that the node omits
    function: ir.Function = ir.from_proto(proto)
    return function


def _with_defaults(node: ir.Node, opset: int) -> onnx.NodeProto:
    proto: onnx.NodeProto = ir.to_proto(node)
    defaults = default_attributes(node.op_type, opset)
    proto.attribute.extend(ir.to_proto(a) for name, a in defaults.items() if name not in node.attributes)
    return proto

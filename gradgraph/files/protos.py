"""Checks of protobuf messages before onnx-ir reads them, and walks through messages.

The checks find faults that onnx-ir would silently repair or crash on; ``gradgraph.graph.checks.validate`` checks
everything else once onnx-ir has read the message. They take time linear in the size of the message, and do not recurse
over nodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph.errors import Finding, counted, refused, shown
from gradgraph.graph.checks import WITH_BODIES, check_tensor, findings_of, refuse_any
from gradgraph.graph.node_forms import described


def check_proto(proto: onnx.ModelProto) -> None:
    """Raise ModelError, with all findings, for faults that onnx-ir does not detect when it reads ``proto``.

    1. no graph at all (an empty file, another kind of message);
    2. a name that is not UTF-8 or is defined twice; an initializer without a name; a sparse initializer;
    3. tensor data that do not match element type and shape, or are stored twice;
    4. attributes that are given twice or whose value is not of the declared type.
    """
    attributes = (finding for _, finding in attribute_findings(proto))
    refuse_any(itertools.chain(message_findings(proto), attributes))


def message_findings(proto: onnx.ModelProto) -> Iterator[Finding]:
    """Yield findings about ``proto``, except findings about single nodes."""
    if not proto.HasField("graph"):
        yield Finding("the model", "contains no graph", "", "export or download it again")
        return
    graphs = [*proto_graphs(proto)]
    names = (text for graph in graphs for text in _texts(graph))
    in_functions = (text for f in proto.functions for text in _texts_of_nodes(f.node))
    for text in itertools.chain(names, in_functions):
        if not isinstance(text, str):  # protobuf's value for bytes that are not UTF-8
            yield Finding(f"the name {shown(text)}", "is not UTF-8", "", _DAMAGED)
            return
    for graph in graphs:
        yield from _graph_findings(graph)
    for tensor in proto_tensors(proto):
        yield from findings_of(check_payload, tensor)


def _graph_findings(graph: onnx.GraphProto) -> Iterator[Finding]:
    for sparse in graph.sparse_initializer:
        yield Finding(
            f"initializer '{shown(sparse.values.name)}'", "is sparse, which is not supported", "", "store it dense"
        )
    yield from _unique("graph inputs", (i.name for i in graph.input))
    yield from _unique("initializers", (t.name for t in graph.initializer))
    if any(not t.name for t in graph.initializer):
        yield Finding("an initializer", "has no name", "", "name it, or remove it")
    outputs = [o for n in graph.node for o in n.output if o]
    yield from _unique("node outputs", [*(i.name for i in graph.input), *outputs])
    yield from _unique("initializers and node outputs", [*(t.name for t in graph.initializer), *outputs])


def _texts(graph: onnx.GraphProto) -> Iterator[str | bytes]:
    yield graph.name
    for named in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        yield named.name
    yield from _texts_of_nodes(graph.node)


def _texts_of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[str | bytes]:
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attr.name for attr in node.attribute)


def _unique(what: str, names: Iterable[str]) -> Iterator[Finding]:
    seen: set[str] = set()
    twice = dict.fromkeys(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    for name in twice:
        yield Finding(f"two {what}", f"are called '{shown(name)}'", "", "give each its own name")


# --- attributes of nodes ------------------------------------------------------------------------------

_ONNX = ("", "ai.onnx")


def attribute_findings(proto: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, Finding]]:
    """Yield (node, finding) for each invalid attribute of a node in any graph or function."""
    for nodes in (proto.graph.node, *(f.node for f in proto.functions)):
        for node in proto_nodes(nodes):
            if node.attribute:
                yield from ((node, finding) for finding in _attribute_findings(node, nodes is proto.graph.node))


_KINDS = onnx.AttributeProto.AttributeType
_VALUE_OF = {
    _KINDS.FLOAT: "f",
    _KINDS.INT: "i",
    _KINDS.STRING: "s",
    _KINDS.TENSOR: "t",
    _KINDS.GRAPH: "g",
    _KINDS.TYPE_PROTO: "tp",
    _KINDS.SPARSE_TENSOR: "sparse_tensor",
    _KINDS.FLOATS: "floats",
    _KINDS.INTS: "ints",
    _KINDS.STRINGS: "strings",
    _KINDS.TENSORS: "tensors",
    _KINDS.GRAPHS: "graphs",
    _KINDS.TYPE_PROTOS: "type_protos",
    _KINDS.SPARSE_TENSORS: "sparse_tensors",
}
_SPARSE = (_KINDS.SPARSE_TENSOR, _KINDS.SPARSE_TENSORS)
_VALUES = frozenset(_VALUE_OF.values())


def _is_binary(attr: onnx.AttributeProto) -> bool:
    """Whether ``attr`` contains text that is not UTF-8."""
    try:
        _ = [text.decode() for text in (attr.s, *attr.strings)]
    except UnicodeDecodeError:
        return True
    return False


def _attribute_findings(node: onnx.NodeProto, in_main: bool) -> Iterator[Finding]:
    seen = set()
    for attr in node.attribute:
        faults = [*_faults(attr, node.domain, in_main)]
        if attr.name in seen:
            faults.insert(0, ("appears twice", "", "remove one of them"))
        seen.add(attr.name)
        if attr.type in _SPARSE:
            faults.append(("has a sparse tensor as an attribute, which is not supported", "", "store it dense"))
        for words, expected, remedy in faults:
            subject = described(node.name, node.domain, node.op_type, node.output)
            named = subject if attr.type in _SPARSE else f"the attribute '{shown(attr.name)}' of {subject}"
            yield Finding(named, words, expected, remedy)


def _faults(attr: onnx.AttributeProto, domain: str, in_main: bool) -> Iterator[tuple[str, str, str]]:
    """Yield the fault of ``attr``, the expected content, and the remedy; nothing if content and declared type match."""
    if attr.type in _SPARSE:
        return
    if attr.ref_attr_name:
        if in_main:
            words = f"refers to '{shown(attr.ref_attr_name)}', an attribute of a function"
            yield words, "this node is not in a function", "give it a value"
    elif attr.type == _KINDS.UNDEFINED:
        yield "has no type", "", _DAMAGED
    elif attr.type in (_KINDS.STRING, _KINDS.STRINGS) and domain in _ONNX and _is_binary(attr):
        yield "is not UTF-8", "", _DAMAGED
    elif others := [f.name for f, _ in attr.ListFields() if f.name in _VALUES and f.name != _VALUE_OF[attr.type]]:
        kind = _KINDS.Name(attr.type).lower()
        yield f"is declared as {kind}", f"its value is stored as '{others[0]}'", "export the model again"


# --- walks --------------------------------------------------------------------------------------------


def proto_graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Yield the main graph and every graph nested in it or in a function."""
    yield proto.graph
    for nodes in (proto.graph.node, *(f.node for f in proto.functions)):
        for node in proto_nodes(nodes):
            if node.attribute:
                yield from node_graphs(node)


def proto_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield ``nodes`` and the nodes of all graphs nested in them."""
    stack = [iter(nodes)]
    while stack:
        for node in stack[-1]:
            yield node
            if node.attribute and (inner := [iter(g.node) for g in node_graphs(node)]):
                stack.extend(inner)
                break
        else:
            stack.pop()


_GRAPH, _GRAPHS = onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS


def node_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs in the attributes of ``node``, without the graphs nested in them."""
    for attr in node.attribute:
        kind = attr.type  # protobuf reads each field by a call
        if kind == _GRAPH:
            yield attr.g
        elif kind == _GRAPHS:
            yield from attr.graphs


def proto_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor: initializers of all graphs, and attributes of all nodes."""
    for graph in proto_graphs(proto):
        yield from graph.initializer
    for nodes in (proto.graph.node, *(f.node for f in proto.functions)):
        for node in proto_nodes(nodes):
            for attr in node.attribute:
                if attr.type == onnx.AttributeProto.TENSOR:
                    yield attr.t
                elif attr.type == onnx.AttributeProto.TENSORS:
                    yield from attr.tensors


_FIELDS: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float_data",
    onnx.TensorProto.COMPLEX64: "float_data",
    onnx.TensorProto.DOUBLE: "double_data",
    onnx.TensorProto.COMPLEX128: "double_data",
    onnx.TensorProto.INT64: "int64_data",
    onnx.TensorProto.UINT32: "uint64_data",
    onnx.TensorProto.UINT64: "uint64_data",
    onnx.TensorProto.STRING: "string_data",
}


_STORES = frozenset({"raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data"})


def check_payload(tensor: onnx.TensorProto) -> None:
    """Raise ModelError unless ``tensor`` stores its data in a single field, in the size that type and shape require."""
    size = check_tensor(tensor.name, tensor.data_type, tensor.dims)
    kind = ir.DataType(tensor.data_type)
    subject = f"tensor '{shown(tensor.name)}' of shape {list(tensor.dims)}"
    outside = tensor.data_location == onnx.TensorProto.EXTERNAL
    field = "raw_data" if tensor.HasField("raw_data") else _FIELDS.get(tensor.data_type, "int32_data")
    stored = [f.name for f, content in tensor.ListFields() if f.name in _STORES and (len(content) or f.name == field)]
    if others := stored if outside else [name for name in stored if name != field]:
        where = "its external data file" if outside else f"'{field}'"
        raise refused(Finding(subject, f"has data in '{others[0]}'", f"its data must be in {where} only", _DAMAGED))
    if outside:
        return  # the file is checked when external data are resolved
    found, unit = len(getattr(tensor, field)), "byte" if field == "raw_data" else "element"
    if field == "raw_data" or (kind != ir.DataType.STRING and kind.bitwidth < 8):
        expected = size
    else:
        expected = math.prod(tensor.dims) * (2 if kind in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128) else 1)
    if found != expected:
        raise refused(
            Finding(subject, f"has {counted(found, unit)}, but its type and shape need {expected:,}", "", _DAMAGED)
        )


_DAMAGED = "the file is damaged, so export or download it again"


def reads(node: onnx.NodeProto) -> set[str]:
    """Return the names that a node reads, including all names in its subgraphs."""
    return {*filter(None, node.input), *names_in_bodies(node)}


_WITHOUT_BODIES = frozenset({"", "com.microsoft.nchwc"})  # domains; of the first, only WITH_BODIES have any


def names_in_bodies(node: onnx.NodeProto) -> set[str]:
    """Return every name that the bodies of a node read, and the names of their outputs.

    The result includes names of values inside the bodies, which callers ignore. Walking through all attributes is slow,
    so ONNX's own operators are inspected only if they have bodies, and onnxruntime's in blocks of channels never.
    """
    if node.domain in _WITHOUT_BODIES and node.op_type not in WITH_BODIES:
        return set()
    names: set[str] = set()
    for body in node_graphs(node):
        names.update(v.name for v in body.output)
        names = names.union(*map(reads, body.node))
    return names


def types_in(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    """Return the declared types of the values of ``graph`` by name, except values in bodies."""
    types = {v.name: v.type for v in (*graph.input, *graph.value_info, *graph.output)}
    return types | {t.name: onnx.helper.make_tensor_type_proto(t.data_type, t.dims) for t in graph.initializer}


def copied(message: Any, keeps: Callable[[Any], bool] = lambda field: True) -> Any:
    """Return a copy of a protobuf message, with the fields for whose descriptor ``keeps`` is true."""
    copy = type(message)()
    for field, value in message.ListFields():
        if keeps(field):
            if hasattr(value, "extend"):
                getattr(copy, field.name).extend(value)
            elif hasattr(value, "CopyFrom"):
                getattr(copy, field.name).CopyFrom(value)
            else:
                setattr(copy, field.name, value)
    return copy

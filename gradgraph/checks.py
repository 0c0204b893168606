"""Is this model well formed? Said in one sentence that names the thing at fault.

``validate`` looks at an onnx-ir model, ``check_proto`` at what onnx-ir would silently repair or trip over when it
reads a protobuf message. Both are linear in the size of the model and use no recursion over nodes or calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import onnx
import onnx_ir as ir

from gradgraph.errors import ModelError, shown

OLDEST_OPSET = 7
NEWEST_OPSET = min(28, onnx.defs.onnx_opset_version())
OLDEST_IR = 3
NEWEST_IR = 14
NODE_LIMIT = 2_000_000  # after inlining; a few kilobytes of functions that call each other twice exceed it
SIZE_LIMIT = 2**63 - 1  # bytes of one tensor

FunctionId = tuple[str, str, str]


# --- onnx-ir models ---------------------------------------------------------------------------------


def validate(model: ir.Model) -> None:
    """Raise ModelError unless the model is well formed.

    1. IR version 3-14, ai.onnx at opset 7-28;
    2. at least one graph output, and each output has a producer;
    3. names are there and unique within a graph (initializers, node outputs; inputs and outputs of a function too);
    4. every node input is a graph input, an initializer or the output of a node;
    5. tensors: known element type, no negative dimension, size below 2**63 bytes;
    6. no cycle among nodes, none among functions, at most NODE_LIMIT nodes once functions are inlined.
    """
    check_versions(model.ir_version, model.opset_imports, any(not n.domain for n in model.graph))
    if not model.graph.outputs:
        raise ModelError("the graph has no outputs; declare at least one, there is nothing to compute otherwise")
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for body in bodies:
        for graph in (body, *body.subgraphs()):
            _check_graph(graph)
    check_calls(
        {f.identifier(): [n.op_identifier() for n in f.all_nodes()] for f in model.functions.values()},
        [n.op_identifier() for n in model.graph.all_nodes()],
    )


def check_versions(ir_version: int | None, opset_imports: dict[str, int], needs_opset: bool) -> None:
    """``needs_opset``: there are nodes of domain ai.onnx."""
    if ir_version is None or not OLDEST_IR <= ir_version <= NEWEST_IR:
        raise ModelError(
            f"the model has IR version {ir_version}, but {OLDEST_IR} to {NEWEST_IR} can be read; "
            "save it again with a current onnx"
        )
    opset = opset_imports.get("", opset_imports.get("ai.onnx"))
    if opset is None and not needs_opset:
        return
    if opset is None:
        raise ModelError("the model imports no opset of domain ai.onnx; add one to opset_import (7 to 28 can be read)")
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise ModelError(
            f"the model uses ai.onnx opset {opset}, but {OLDEST_OPSET} to {NEWEST_OPSET} can be read; "
            "convert it with onnx.version_converter, or export it again"
        )


def _check_graph(graph: ir.Graph | ir.Function) -> None:
    known: set[str] = set()
    for value in _declared(graph):
        if not value.name:
            continue  # an unnamed value is named by the normal form
        if value.name in known:
            raise ModelError(f"two values are called '{shown(value.name)}'; give each its own name")
        known.add(value.name)
        if value.const_value is not None:
            check_tensor(value.name, value.const_value.dtype, value.const_value.shape)
    for node in graph:
        for source in node.inputs:
            if source is not None and _dangles(source):
                raise ModelError(
                    f"{describe(node)} reads '{shown(source.name)}', which is no graph input, initializer or node "
                    "output; remove the node or define the value"
                )
    for value in graph.outputs:
        if _dangles(value):
            raise ModelError(f"graph output '{shown(value.name)}' is produced by no node; remove it from the outputs")
    _check_acyclic(graph)


def _declared(graph: ir.Graph | ir.Function) -> Iterator[ir.Value]:
    yield from graph.inputs
    if isinstance(graph, ir.Graph):
        yield from (v for v in graph.initializers.values() if not v.is_graph_input())
    for node in graph:
        yield from node.outputs


def _dangles(value: ir.Value) -> bool:
    return value.producer() is None and not value.is_graph_input() and not value.is_initializer()


def _check_acyclic(graph: ir.Graph | ir.Function) -> None:
    """Kahn's algorithm over the nodes of one graph, with what a node's subgraphs read counted as read by the node."""
    if in_order(graph):
        return
    waits: dict[ir.Node, int] = {}
    readers: dict[ir.Node, list[ir.Node]] = {}
    nodes = list(graph)
    members = set(nodes)
    for node in nodes:
        sources = {p for v in _reads(node) if (p := v.producer()) is not None and p in members}
        waits[node] = len(sources)
        for source in sources:
            readers.setdefault(source, []).append(node)
    ready = [node for node in nodes if not waits[node]]
    done = 0
    while ready:
        node = ready.pop()
        done += 1
        for reader in readers.get(node, ()):
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    if done < len(nodes):
        names = _cycle({n for n in nodes if waits[n]})
        raise ModelError(f"the graph has a cycle through {' -> '.join(names)}; a node must not read what depends on it")


def in_order(graph: ir.Graph | ir.Function) -> bool:
    """Is this a graph without bodies whose nodes read only what stands before them? So most files are."""
    seen: set[ir.Node] = set()
    for node in graph:
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if producer is not None and producer not in seen and producer.graph is node.graph:
                return False
        if node.attributes and any(True for _ in subgraphs(node)):
            return False
        seen.add(node)
    return True


def _reads(node: ir.Node) -> Iterator[ir.Value]:
    inner = [node]
    if any(
        a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values() if not a.is_ref()
    ):
        inner.extend(n for g in subgraphs(node) for n in g.all_nodes())
        yield from (v for g in subgraphs(node) for v in g.outputs)
    for n in inner:
        yield from (v for v in n.inputs if v is not None)


WITH_BODIES = frozenset({"If", "Loop", "Scan", "SequenceMap"})


def has_bodies(node: ir.Node) -> bool:
    """Is this one of ONNX's operators with subgraphs?"""
    return node.op_type in WITH_BODIES and node.domain == ""


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs among the attributes of ``node`` (not those nested deeper)."""
    for attr in node.attributes.values():
        if attr.is_ref():
            continue
        if attr.type == ir.AttributeType.GRAPH:
            yield attr.as_graph()
        elif attr.type == ir.AttributeType.GRAPHS:
            yield from attr.as_graphs()


def _cycle(stuck: set[ir.Node]) -> list[str]:
    """The nodes of one cycle among ``stuck``, each of which reads another member: walk back until one repeats."""
    node = next(iter(stuck))
    path: dict[ir.Node, None] = {}
    while node not in path:
        path[node] = None
        node = next(p for v in _reads(node) if (p := v.producer()) in stuck and p is not None)
    walk = list(path)
    ring = [*walk[walk.index(node) :], node][::-1]
    names = [f"'{shown(n.name or n.op_type)}'" for n in ring]
    return names if len(names) <= 6 else [*names[:3], "…", *names[-2:]]


def describe(node: ir.Node) -> str:
    """``node '/head/Gemm' (Gemm)``."""
    return f"node '{shown(node.name or '')}' ({shown(node.domain + '.' if node.domain else '')}{shown(node.op_type)})"


def check_tensor(name: str | None, dtype: int, shape: Iterable[object]) -> int:
    """Raise ModelError unless such a tensor can exist; return its size in bytes (0 for strings)."""
    try:
        kind = ir.DataType(dtype)
    except ValueError:
        kind = ir.DataType.UNDEFINED
    if kind == ir.DataType.UNDEFINED:
        raise ModelError(
            f"tensor '{shown(name)}' has the unknown element type {int(dtype)}; write it with a type that ONNX defines"
        )
    dims = [d for d in shape if isinstance(d, int)]
    if any(d < 0 for d in dims):
        raise ModelError(
            f"tensor '{shown(name)}' has a negative dimension in {dims}; a stored tensor needs its true shape"
        )
    bits = 0 if kind == ir.DataType.STRING else kind.bitwidth
    size = math.ceil(math.prod(dims) * bits / 8) if bits % 8 else math.prod(dims) * bits // 8
    if math.prod(dims) > SIZE_LIMIT or size > SIZE_LIMIT:
        raise ModelError(
            f"tensor '{shown(name)}' of shape {dims} would take more than 2**63 bytes; its dimensions are damaged"
        )
    return size


# --- calls of model-local functions ---------------------------------------------------------------------


def check_calls(functions: dict[FunctionId, list[FunctionId]], main: list[FunctionId]) -> None:
    """Raise ModelError if functions call each other in a ring, or inlining them would pass NODE_LIMIT nodes."""
    sizes: dict[FunctionId, int] = {}
    for root in functions:
        _measure(root, functions, sizes)
    total = sum(sizes.get(call, 1) for call in main)
    if total > NODE_LIMIT:
        raise ModelError(
            f"inlining the model's functions would expand it to {_rounded(total)} nodes, and the limit is "
            f"{NODE_LIMIT:,}; the file is damaged or malicious"
        )


def _measure(root: FunctionId, functions: dict[FunctionId, list[FunctionId]], sizes: dict[FunctionId, int]) -> None:
    """Number of nodes that each function reachable from ``root`` expands to (depth first, with a stack)."""
    path: dict[FunctionId, Iterator[FunctionId]] = {}
    stack = [root]
    while stack:
        top = stack[-1]
        if top in sizes:
            stack.pop()
            continue
        calls = path.setdefault(top, iter(functions[top]))
        below = next((c for c in calls if c in functions and c not in sizes), None)
        if below is None:
            sizes[top] = sum(sizes.get(call, 1) for call in functions[top])
            del path[top]
        elif below in path:
            ring = [*stack[stack.index(below) :], below]
            names = [f"'{shown(name)}'" for _, name, _ in (ring if len(ring) <= 6 else [*ring[:3], *ring[-2:]])]
            raise ModelError(
                f"functions call each other in a ring: {' -> '.join(names)}; ONNX functions must not be recursive"
            )
        else:
            stack.append(below)


def _rounded(count: int) -> str:
    return f"{count:,}" if count < 10**12 else f"more than 10**{len(str(count)) - 1}"


# --- protobuf messages ----------------------------------------------------------------------------------


def check_proto(proto: onnx.ModelProto) -> None:
    """Raise ModelError for what onnx-ir would not notice when it reads ``proto``.

    1. no graph at all (an empty file, another kind of message); versions outside what can be read;
    2. a name that is defined twice; an initializer without a name; a sparse initializer;
    3. tensor data that does not fit element type and shape;
    4. recursive functions and function bombs (before onnx-ir walks them).
    """
    if not proto.HasField("graph"):
        raise ModelError("the message holds no graph; this is no ONNX model, or a damaged one")
    uses_onnx = any(n.domain in ("", "ai.onnx") for n in proto.graph.node)
    check_versions(proto.ir_version or None, {o.domain: o.version for o in proto.opset_import}, uses_onnx)
    check_calls(
        {(f.domain, f.name, f.overload): [_call(n) for n in proto_nodes(f.node)] for f in proto.functions},
        [_call(n) for n in proto_nodes(proto.graph.node)],
    )
    for graph in proto_graphs(proto):
        _check_graph_proto(graph)
    for tensor in proto_tensors(proto):
        check_payload(tensor)


def _call(node: onnx.NodeProto) -> FunctionId:
    return node.domain, node.op_type, node.overload


def _check_graph_proto(graph: onnx.GraphProto) -> None:
    for text in _texts(graph):
        if not isinstance(text, str):  # what protobuf gives for bytes that are not UTF-8
            raise ModelError(
                f"the name {shown(text)} is not UTF-8; the file is damaged, so export or download it again"
            )
    for node in graph.node:
        for attr in node.attribute:
            if attr.type == onnx.AttributeProto.UNDEFINED and not attr.ref_attr_name:
                raise ModelError(
                    f"the attribute '{shown(attr.name)}' of {shown(node.op_type)} (node '{shown(node.name)}') has no "
                    "type; the file is damaged, so export or download it again"
                )
            if attr.type in (onnx.AttributeProto.SPARSE_TENSOR, onnx.AttributeProto.SPARSE_TENSORS):
                raise ModelError(
                    f"{shown(node.op_type)} (node '{shown(node.name)}') holds a sparse tensor, which is not supported; "
                    "store it dense"
                )
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        raise ModelError(f"initializer '{shown(name)}' is sparse, which is not supported; store it dense")
    _unique("graph inputs", (i.name for i in graph.input))
    _unique("initializers", (t.name for t in graph.initializer))
    if any(not t.name for t in graph.initializer):
        raise ModelError("an initializer has no name; name it, or remove it")
    outputs = [o for n in graph.node for o in n.output if o]
    _unique("node outputs", [*(i.name for i in graph.input), *outputs])
    _unique("initializers and node outputs", [*(t.name for t in graph.initializer), *outputs])


def _texts(graph: onnx.GraphProto) -> Iterator[str | bytes]:
    yield graph.name
    for named in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        yield named.name
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attr.name for attr in node.attribute)


def _unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ModelError(f"two {what} are called '{shown(name)}'; give each its own name")
        seen.add(name)


def proto_graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The main graph and every graph nested in it or in a function."""
    yield proto.graph
    for nodes in (proto.graph.node, *(f.node for f in proto.functions)):
        for node in proto_nodes(nodes):
            if node.attribute:
                yield from _node_graphs(node)


def proto_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """``nodes`` and those of all graphs nested in them."""
    stack = [iter(nodes)]
    while stack:
        for node in stack[-1]:
            yield node
            if node.attribute and (inner := [iter(g.node) for g in _node_graphs(node)]):
                stack.extend(inner)
                break
        else:
            stack.pop()


def _node_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attr in node.attribute:
        if attr.type == onnx.AttributeProto.GRAPH:
            yield attr.g
        elif attr.type == onnx.AttributeProto.GRAPHS:
            yield from attr.graphs


def proto_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor: initializers of all graphs, and attributes of all nodes."""
    for graph in proto_graphs(proto):
        yield from graph.initializer
    for nodes in (proto.graph.node, *(f.node for f in proto.functions)):
        for node in proto_nodes(nodes):
            for attr in node.attribute:
                if attr.type == onnx.AttributeProto.TENSOR:
                    yield attr.t
                elif attr.type == onnx.AttributeProto.TENSORS:
                    yield from attr.tensors


_FIELDS = {
    onnx.TensorProto.FLOAT: "float_data",
    onnx.TensorProto.COMPLEX64: "float_data",
    onnx.TensorProto.DOUBLE: "double_data",
    onnx.TensorProto.COMPLEX128: "double_data",
    onnx.TensorProto.INT64: "int64_data",
    onnx.TensorProto.UINT32: "uint64_data",
    onnx.TensorProto.UINT64: "uint64_data",
    onnx.TensorProto.STRING: "string_data",
}


def check_payload(tensor: onnx.TensorProto) -> None:
    """Raise ModelError unless the data stored in ``tensor`` are as many as its type and shape say."""
    size = check_tensor(tensor.name, tensor.data_type, tensor.dims)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return  # the file is looked at where external data are resolved
    count = math.prod(tensor.dims)
    if tensor.HasField("raw_data"):
        found, expected, unit = len(tensor.raw_data), size, "bytes"
    else:
        kind = ir.DataType(tensor.data_type)
        field = _FIELDS.get(tensor.data_type, "int32_data")
        found, unit = len(getattr(tensor, field)), "entries"
        complex_pairs = 2 if kind in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128) else 1
        packed = kind.bitwidth < 8 if kind != ir.DataType.STRING else False
        expected = size if packed else count * complex_pairs
    if found != expected:
        raise ModelError(
            f"tensor '{shown(tensor.name)}' of shape {list(tensor.dims)} holds {found} {unit} where its type and shape "
            f"need {expected}; the file is damaged"
        )

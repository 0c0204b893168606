"""Checks that a model is well formed; errors are one sentence that names the faulty item.

``validate`` checks an onnx-ir model; before it, ``protos.check_proto`` checks a protobuf message for faults that
onnx-ir would silently repair or crash on. Both are linear in the size of the model and do not recurse over nodes or
calls.
"""

from __future__ import annotations

import functools
import graphlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph.errors import Finding, ModelError, refused, shown
from gradgraph.graph.node_forms import described, form_findings
from gradgraph.graph.ranks import MOST_AXES
from gradgraph.graph.shapes import known_sizes

OLDEST_OPSET = 1
NEWEST_READ = 28  # with an onnx that supports it
NEWEST_OPSET = min(NEWEST_READ, onnx.defs.onnx_opset_version())
OLDEST_IR = 3
NEWEST_IR = 14
NODE_LIMIT = 2_000_000  # after inlining; a few kilobytes of nested functions exceed it
FINDINGS_LIMIT = 100  # maximum findings to collect; a damaged file may have one per node
SIZE_LIMIT = 2**63 - 1  # bytes of one tensor
UNNAMED = "gradgraph.unnamed"  # Node.meta key: gradgraph generated the name

FunctionId = tuple[str, str, str]


# --- onnx-ir models ---------------------------------------------------------------------------------


def validate(model: ir.Model) -> None:
    """Raise ModelError unless the model is well formed:

    1. IR version 3-14, ai.onnx at opset 1-28, also in functions;
    2. at least one graph output, and each output has a producer;
    3. initializers and node outputs have names that are unique within a graph, as have a function's inputs and outputs;
    4. every node input is a graph input, an initializer or the output of a node;
    5. tensors: known element type, no negative dimension, size below 2**63 bytes, at most MOST_AXES axes; the same
       limits for declared shapes of graph inputs;
    6. no cycle among nodes or functions, and at most NODE_LIMIT nodes after inlining;
    7. nodes are well-formed calls of their operators (``node_forms.py``).
    """
    _check_versions(model)
    _check_calls(
        {f.identifier(): [n.op_identifier() for n in f.all_nodes()] for f in model.functions.values()},
        [n.op_identifier() for n in model.graph.all_nodes()],
    )
    if not model.graph.outputs:
        remedy = "declare at least one"
        raise refused(Finding("the graph", "has no outputs", "", remedy))
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    graphs = (graph for body in bodies for graph in (body, *body.subgraphs()))
    refuse_any(itertools.chain((f for graph in graphs for f in _graph_findings(graph)), malformed_nodes(model)))


def refuse_any(findings: Iterable[Finding]) -> None:
    """Raise ModelError if there are findings, with the first FINDINGS_LIMIT of them."""
    if some := [*itertools.islice(findings, FINDINGS_LIMIT)]:
        raise refused(*some)


def malformed_nodes(model: ir.Model) -> Iterator[Finding]:
    """Yield findings about nodes, of any graph or function, that are no well-formed calls of their operators."""
    own = {identifier[:2] for identifier in model.functions}
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for body in bodies:
        opset = body.opset_imports.get("", body.opset_imports.get("ai.onnx", 0))
        for node in body.all_nodes():
            version = node.version or opset
            if node.domain == "" and 0 < version <= NEWEST_OPSET and ("", node.op_type) not in own:
                yield from form_findings(node, version, functools.partial(describe, node))


def _check_versions(model: ir.Model) -> None:
    """Raise ModelError for an unsupported IR version or opset, or if standard operators have no opset."""
    version = model.ir_version or None
    if version is None or not OLDEST_IR <= version <= NEWEST_IR:
        words = f"has IR version {version}, but {OLDEST_IR} to {NEWEST_IR} can be read"
        raise refused(Finding("the model", words, "", "export it again with one of these"))
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx"))
    if opset is None and any(not n.domain for n in model.graph):
        remedy = f"add one to opset_import ({OLDEST_OPSET} to {NEWEST_OPSET} can be read)"
        raise refused(Finding("the model", "imports no opset of domain ai.onnx", "", remedy))
    if opset is not None and not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        words = f"uses ai.onnx opset {opset}, but {OLDEST_OPSET} to {NEWEST_OPSET} can be read"
        raise refused(Finding("the model", words, "", _other_opset(opset)))
    for function in model.functions.values():
        opset = function.opset_imports.get("", NEWEST_OPSET)
        if not 0 < opset <= NEWEST_OPSET:
            words = f"uses ai.onnx opset {opset}, but up to {NEWEST_OPSET} can be read"
            raise refused(Finding(f"function '{shown(function.name)}'", words, "", _other_opset(opset)))


def _other_opset(opset: int) -> str:
    """Return the fix that an error message suggests for the unsupported ``opset``."""
    if opset < OLDEST_OPSET:
        return f"export it again at opset {OLDEST_OPSET} or newer"
    newer = "" if opset > NEWEST_READ else ", or update onnx"
    return f"export it again at opset {NEWEST_OPSET} or older{newer}"


def _graph_findings(graph: ir.Graph | ir.Function) -> Iterator[Finding]:
    known: set[str] = set()
    for value in _declared(graph):
        if not value.name:
            continue  # the normal form names unnamed values
        if value.name in known:
            yield Finding("two values", f"are called '{shown(value.name)}'", "", "give each its own name")
        known.add(value.name)
        if value.const_value is not None:
            yield from findings_of(check_tensor, value.name, value.const_value.dtype, value.const_value.shape)
        elif value.shape is not None and value.is_graph_input() and (words := beyond_limits(value.shape)):
            yield Finding(f"input '{shown(value.name)}'", f"is declared with {words}", "", "correct its shape")
    for node in graph:
        for source in node.inputs:
            if source is not None and _dangles(source):
                words = f"reads '{shown(source.name)}', which is not a graph input, initializer or node output"
                yield Finding(describe(node), words, "", "remove the node or define the value")
    for value in graph.outputs:
        if _dangles(value):
            subject = f"graph output '{shown(value.name)}'"
            yield Finding(subject, "is produced by no node", "", "remove it from the outputs")
    yield from findings_of(_check_acyclic, graph)


def findings_of(check: Callable[..., object], *arguments: object) -> Iterator[Finding]:
    """Call ``check`` with ``arguments``; yield the findings of the ModelError that it raises, if any."""
    try:
        check(*arguments)
    except ModelError as error:
        yield from error.findings


def _declared(graph: ir.Graph | ir.Function) -> Iterator[ir.Value]:
    yield from graph.inputs
    if isinstance(graph, ir.Graph):
        yield from (v for v in graph.initializers.values() if not v.is_graph_input())
    for node in graph:
        yield from node.outputs


def _dangles(value: ir.Value) -> bool:
    return value.producer() is None and not value.is_graph_input() and not value.is_initializer()


def _check_acyclic(graph: ir.Graph | ir.Function) -> None:
    """Raise ModelError if the nodes of ``graph`` form a cycle, including cycles through values that subgraphs read."""
    if in_order(graph):
        return
    members = set(graph)
    makers = {node: [p for v in _reads(node) if (p := v.producer()) in members] for node in graph}
    if ring := _ring(makers):
        words = f"has a cycle through {_chain(shown(n.name or n.op_type) for n in ring)}"
        raise refused(Finding("the graph", words, "", "a node must not depend on itself"))


def _ring(before: Mapping[Any, Iterable[Any]]) -> list[Any]:
    """Return a cycle of items, each of which is ``before`` the next, from an item to itself; empty if there is none."""
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def _chain(names: Iterable[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return " -> ".join(quoted if len(quoted) <= 6 else [*quoted[:3], "…", *quoted[-2:]])


def in_order(graph: ir.Graph | ir.Function) -> bool:
    """Whether ``graph`` is topologically sorted and none of its nodes has a subgraph, as in most files."""
    return is_sorted(graph) and not any(True for node in graph if node.attributes for _ in subgraphs(node))


def is_sorted(graph: ir.Graph | ir.Function) -> bool:
    """Whether every node reads only earlier values of this graph; bodies are ignored."""
    seen: set[ir.Node] = set()
    for node in graph:
        makers = (v.producer() for v in node.inputs if v is not None)
        if any(p is not None and p not in seen and p.graph is node.graph for p in makers):
            return False
        seen.add(node)
    return True


def _reads(node: ir.Node) -> Iterator[ir.Value]:
    bodies = list(subgraphs(node))
    yield from (v for body in bodies for v in body.outputs)
    for inner in (node, *(n for body in bodies for n in body.all_nodes())):
        yield from (v for v in inner.inputs if v is not None)


WITH_BODIES = frozenset({"If", "Loop", "Scan", "SequenceMap"})
DRAWING = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)


_GRAPH_TYPES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def has_bodies(node: ir.Node) -> bool:
    """Whether ``node`` is one of ONNX's own operators with subgraphs, such as If and Loop."""
    return node.op_type in WITH_BODIES and node.domain == ""


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield the graphs among the attributes of ``node``, without graphs nested in them."""
    for attr in node.attributes.data.values():  # without ``.data``, each access is a call in Python
        if attr.type in _GRAPH_TYPES and not attr.is_ref():
            yield from [attr.as_graph()] if attr.type == ir.AttributeType.GRAPH else attr.as_graphs()


def describe(node: ir.Node) -> str:
    """Return ``node '/head/Gemm' (Gemm)``; an unnamed node is identified by its first output."""
    name = None if UNNAMED in node.meta else node.name
    return described(name, node.domain, node.op_type, (v.name for v in node.outputs))


def beyond_limits(shape: ir.Shape) -> str | None:
    """Return why no array can have ``shape``, as a phrase for after "with"; None if one can. Ignores unknown sizes."""
    if len(shape) > MOST_AXES:
        return f"{len(shape)} axes, more than the {MOST_AXES} that NumPy supports"
    sizes = [d for d in known_sizes(shape) if d > 0]
    return None if math.prod(sizes) <= SIZE_LIMIT else f"the sizes {shown(sizes)}, more than 2**63 elements"


def check_tensor(name: str | None, dtype: int, shape: Iterable[object]) -> int:
    """Return the size in bytes of a tensor of this type and shape, 0 for strings.

    Raises:
        ModelError: if no such tensor can exist.
    """

    def failure(words: str, remedy: str) -> ModelError:
        return refused(Finding(f"tensor '{shown(name)}'", words, "", remedy))

    try:
        kind = ir.DataType(dtype)
    except ValueError:
        kind = ir.DataType.UNDEFINED
    if kind == ir.DataType.UNDEFINED:
        raise failure(f"has the unknown element type {int(dtype)}", "write it with a type that ONNX defines")
    dims = known_sizes(shape)
    if len(dims) > MOST_AXES:
        raise failure(
            f"has {len(dims)} axes, more than the {MOST_AXES} that NumPy supports", "export or download the model again"
        )
    if any(d < 0 for d in dims):
        raise failure(f"has a negative dimension in {shown(dims)}", "export or download the model again")
    bits = 0 if kind == ir.DataType.STRING else kind.bitwidth
    rows = math.prod(d for d in dims if d)  # zeros are skipped: NumPy also rejects empty arrays with other huge sizes
    if rows * max(bits // 8, 1) > SIZE_LIMIT:
        raise failure(
            f"has shape {shown(dims)}, which needs more than 2**63 bytes", "export or download the model again"
        )
    return 0 if 0 in dims else -(-rows * bits // 8)


# --- calls of model-local functions ---------------------------------------------------------------------


def _check_calls(functions: Mapping[FunctionId, Collection[FunctionId]], main: Iterable[FunctionId]) -> None:
    """Raise ModelError if functions are recursive, or inlining them would exceed NODE_LIMIT nodes."""
    inner = {root: [call for call in calls if call in functions] for root, calls in functions.items()}
    if ring := _ring(inner):
        words = f"call each other in a cycle: {_chain(shown(name) for _, name, _ in reversed(ring))}"
        raise refused(Finding("functions", words, "", "ONNX functions must not be recursive"))
    sizes: dict[FunctionId, int] = {}
    for root in graphlib.TopologicalSorter(inner).static_order():
        sizes[root] = sum(sizes.get(call, 1) for call in functions[root])
    total = sum(sizes.get(call, 1) for call in main)
    if total > NODE_LIMIT:
        count = f"{total:,}" if total < 10**12 else f"more than 10**{len(str(total)) - 1}"
        words = f"would expand it to {count} nodes"
        expected = f"the limit is {NODE_LIMIT:,}"
        raise refused(Finding("inlining the model's functions", words, expected, "the file is damaged or malicious"))

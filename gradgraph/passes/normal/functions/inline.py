"""Pass: inline calls of model-local functions.

onnx-ir's own pass is not used: it rejects functions of another opset than the model's, and graphs as attributes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import onnx_ir as ir

from gradgraph.errors import ModelError, counted, shown
from gradgraph.graph.checks import FunctionId, subgraphs
from gradgraph.passes.normal.edit import Editor, nodes_of


def inline_functions(model: ir.Model, only: Collection[FunctionId] | None = None) -> bool:
    """Inline every call, or calls of the functions in ``only``; return True if anything changed.

    1. Nested calls are inlined too, in the main graph and in subgraphs (with a stack, without recursion).
    2. A reference to a function attribute is replaced by the caller's value, or else by the function's default; without
       either, the attribute is absent. An input that the caller omits is absent in the body.
    3. A new node has the function's own ai.onnx opset in ``Node.version`` if it differs from the model's.
    4. The inlined functions, and functions without a call, are removed.
    """
    chosen = {k: f for k, f in model.functions.items() if only is None or k in only}
    if not chosen:
        return False
    editor = Editor(model)
    opset = model.opset_imports.get("", 0)
    waiting = [n for n in nodes_of(model) if n.op_identifier() in chosen]
    while waiting:
        node = waiting.pop()
        function = chosen[node.op_identifier()]
        _import_domains(model, function)
        rename = functools.partial(editor.op.fresh_in, node.name or node.op_type)
        body, outputs = instantiate(function, node.inputs, node.attributes, rename)
        version = function.opset_imports.get("", opset)
        for new in _all_nodes(body):
            if new.version is None and version != opset:
                new.version = version
        editor.op.nodes.extend(body)
        editor.replace(node, *map(editor.op.wrap, outputs))
        waiting.extend(n for n in _all_nodes(body) if n.op_identifier() in chosen)
    for identifier in chosen:
        del model.functions[identifier]
    return True


def _import_domains(model: ir.Model, function: ir.Function) -> None:
    for domain, version in function.opset_imports.items():
        if domain and model.opset_imports.setdefault(domain, version) != version:
            raise ModelError(
                f"function '{shown(function.name)}' uses opset {version} of domain '{shown(domain)}' and the model "
                f"opset {model.opset_imports[domain]}; export the model again with one version of that domain"
            )


def _all_nodes(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    found = list(nodes)
    for node in found:
        found.extend(n for g in subgraphs(node) for n in g)
    return found


# --- copying a body -----------------------------------------------------------------------------------


def instantiate(
    function: ir.Function,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, ir.Attr],
    rename: Callable[[str], str],
) -> tuple[list[ir.Node], list[ir.Value | None]]:
    """Copy the nodes of ``function`` so that they read ``inputs``; return the copies and the outputs of the function.

    Raises:
        ModelError: there are more inputs than the function has.
    """
    if len(inputs) > len(function.inputs):
        raise ModelError(
            f"a call of function '{shown(function.name)}' passes {counted(len(inputs), 'input')}, but it has "
            f"{len(function.inputs)}; export the model again"
        )
    defaults = {name: a for name, a in function.attributes.items() if not a.is_ref() and a.value is not None}
    copier = _Copier({**defaults, **attributes}, rename)
    padded = [*inputs, *[None] * (len(function.inputs) - len(inputs))]
    copier.values.update(zip(function.inputs, padded, strict=True))
    nodes = [copier.node(n) for n in function]
    return nodes, [copier.values[v] for v in function.outputs]


def applied(
    graph: ir.Graph,
    inputs: Sequence[ir.Value],
    rename: Callable[[str], str],
    stored: Mapping[ir.Value, ir.Value] = {},
) -> tuple[list[ir.Node], dict[ir.Value, ir.Value]]:
    """Copy the nodes of a graph so that they read ``inputs``; return the copies, and the copy of each value.

    The copies read ``stored`` in place of captured values and initializers.
    """
    given = {**dict(zip(graph.inputs, inputs, strict=True)), **stored}
    nodes, copies = copied(list(graph), rename, given)
    return nodes, given | copies


def copied(
    nodes: Sequence[ir.Node], rename: Callable[[str], str], stored: Mapping[ir.Value, ir.Value] = {}
) -> tuple[list[ir.Node], dict[ir.Value, ir.Value]]:
    """Copy ``nodes``, which are in graph order; return the copies, and the copy of each output.

    The copies read ``stored`` in place of values from outside ``nodes``.
    """
    copier = _Copier({}, rename)
    copier.values.update(stored)
    copies = [copier.node(n) for n in nodes]
    return copies, {y: new for n in nodes for y in n.outputs if (new := copier.values[y]) is not None}


class _Copier:
    def __init__(self, attributes: Mapping[str, ir.Attr], rename: Callable[[str], str]) -> None:
        self.attributes = attributes
        self.rename = rename
        self.values: dict[ir.Value, ir.Value | None] = {}

    def node(self, node: ir.Node) -> ir.Node:
        copy = ir.Node(
            node.domain,
            node.op_type,
            [None if v is None else self.values.get(v, v) for v in node.inputs],
            [a for old in node.attributes.values() if (a := self._attribute(old)) is not None],
            overload=node.overload,
            num_outputs=len(node.outputs),
            version=node.version,
            name=self.rename(node.name or node.op_type),
            doc_string=node.doc_string,
            metadata_props=dict(node.metadata_props),
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            self._describe(old, new)
        return copy

    def _describe(self, old: ir.Value, new: ir.Value) -> None:
        self.values[old] = new
        new.name = self.rename(old.name) if old.name else old.name
        new.type, new.shape = old.type, old.shape

    def _attribute(self, attr: ir.Attr) -> ir.Attr | None:
        if attr.is_ref():
            given = self.attributes.get(attr.ref_attr_name or "")
            return None if given is None else self._attribute(ir.Attr(attr.name, given.type, given.value))
        if attr.type == ir.AttributeType.GRAPH:
            return ir.AttrGraph(attr.name, self._graph(attr.as_graph()))
        if attr.type == ir.AttributeType.GRAPHS:
            return ir.AttrGraphs(attr.name, [self._graph(g) for g in attr.as_graphs()])
        return attr

    def _graph(self, graph: ir.Graph) -> ir.Graph:
        inputs = [self._value(v) for v in graph.inputs]
        initializers = [self._value(v) for v in graph.initializers.values() if v not in self.values]
        nodes = [self.node(n) for n in graph]
        outputs = [v for o in graph.outputs if (v := self.values.get(o, o)) is not None]
        return ir.Graph(inputs, outputs, nodes=nodes, initializers=initializers, name=graph.name)

    def _value(self, old: ir.Value) -> ir.Value:
        new = ir.Value(const_value=old.const_value)
        self._describe(old, new)
        return new

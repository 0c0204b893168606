"""Write calls of named operators as calls of model-local functions whose bodies are the portable forms.

1. Every node of the domain ``gradgraph`` gets a function: its portable form, written for the node's shapes.
2. Calls with equal bodies share a function, regardless of their shapes. The first body of an operator has the
   operator's name, further ones are numbered (``ConvGradWeight_2``): the name alone identifies a function, as some
   runtimes ignore ``overload``.
3. ``write_inline`` writes the bodies in place instead, for runtimes without functions.

So a saved step shows ``ConvGradWeight`` as one node and still consists of standard ONNX: onnxruntime, its JavaScript
packages and onnx's ReferenceEvaluator run it directly, inlining functions before they optimise.
"""

from __future__ import annotations

from collections.abc import Hashable

import onnx_ir as ir

from gradgraph.graph.builder import Builder
from gradgraph.graph.scoped_names import DOMAIN, VERSION, function_name, operator_name
from gradgraph.graph.shapes import OPSET
from gradgraph.passes.normal.edit import Editor, nodes_of
from gradgraph.rules.named_operators import OPERATORS, operator_of, write_portable


def write_functions(model: ir.Model) -> ir.Model:
    """Turn every named operator in ``model`` into a call of a model-local function, in place; return ``model``."""
    bodies: dict[str, dict[bytes, str]] = {}  # operator -> body -> name of the function
    names: dict[Hashable, str] = {}
    for node in nodes_of(model):
        if operator_of(node) is None:
            continue
        key = _body_key(node)
        if key not in names:
            names[key] = _name_of_shared_body(model, _as_function(node), bodies.setdefault(node.op_type, {}))
        node.op_type = names[key]
    if names:
        model.opset_imports[DOMAIN] = VERSION
    return model


def _body_key(node: ir.Node) -> Hashable:
    """Return a key for a node: equal keys imply equal function bodies, which would be slower to compare."""
    inputs = tuple(None if v is None else (v.dtype, str(v.shape)) for v in node.inputs)
    attributes = tuple(sorted((a.name, repr(a.value)) for a in node.attributes.values()))
    return node.op_type, inputs, attributes, len(node.outputs)


def _name_of_shared_body(model: ir.Model, function: ir.Function, known: dict[bytes, str]) -> str:
    """Return the name of the function in ``model`` with the body of ``function``; add ``function`` if there is none."""
    body = ir.to_proto(function).SerializeToString(deterministic=True)
    if body not in known:
        known[body] = function.name = function_name(function.name, len(known) + 1)
        model.functions[function.identifier()] = function
    return known[body]


def forget_functions(model: ir.Model) -> None:
    """Turn calls of model-local functions back into named operators, in place, also in steps of older versions."""
    for identifier in [i for i in model.functions if i[0] == DOMAIN]:
        del model.functions[identifier]
    for node in nodes_of(model):
        if node.domain == DOMAIN:
            node.op_type, node.overload = operator_name(node.op_type), ""  # older steps identify bodies by overload


def write_inline(model: ir.Model) -> ir.Model:
    """Replace every named operator with its portable form, in place; return ``model``."""
    forget_functions(model)
    editor = Editor(model)
    for node in list(nodes_of(model)):
        if operator_of(node) is not None:
            editor.op.scope = node.name or ""
            editor.replace(node, *write_portable(editor.op, node))
    model.opset_imports.pop(DOMAIN, None)
    return model


def _as_function(node: ir.Node) -> ir.Function:
    """Return a function with the attributes of ``node``, whose body is the portable form for their values."""
    op = Builder()
    inputs = [_own_input(op, node, i) for i in range(len(node.inputs))]
    passed = [None if old is None else new for old, new in zip(node.inputs, inputs, strict=True)]
    call = ir.Node(DOMAIN, node.op_type, passed, node.attributes.values(), num_outputs=len(node.outputs))
    for old, new in zip(node.outputs, call.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
    results = write_portable(op, call)
    call.resize_inputs(0)
    outputs: list[ir.Value] = []
    for result in results:
        own = result.value.producer() in op.nodes and result.value not in outputs
        outputs.append(result.value if own else op.Identity(result).value)
    constants = [
        ir.Node("", "Constant", [], [ir.AttrTensor("value", v.const_value)], outputs=[v], name=v.name)
        for v in op.constants
        if v.const_value is not None
    ]
    for value in (*inputs, *(v for node in (*constants, *op.nodes) for v in node.outputs)):
        value.type = value.shape = None  # a body that does not depend on shapes is shared by all
    graph = ir.Graph(inputs, outputs, nodes=[*constants, *op.nodes], opset_imports={"": OPSET}, name=node.op_type)
    declared = [ir.Attr(a.name, a.type, None) for a in node.attributes.values()]
    return ir.Function(DOMAIN, node.op_type, graph=graph, attributes=declared)


def _own_input(op: Builder, node: ir.Node, i: int) -> ir.Value:
    """Return a function input for input ``i`` of ``node``; without a type if ``node`` lacks this optional input."""
    name, given = op.fresh(OPERATORS[node.op_type].parameters[i]), node.inputs[i]
    return ir.Value(name=name) if given is None else ir.Value(name=name, type=given.type, shape=given.shape)

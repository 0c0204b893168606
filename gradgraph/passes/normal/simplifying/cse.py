"""Common subexpression elimination: merge nodes that compute equal values.

1. Two nodes of one graph are equal if they have the same operator, attributes, number of outputs and inputs; for Add,
   Mul, Equal and the logical operators, in any order of inputs. Constants are equal if their values are.
2. Two Shape nodes are equal if their results are known to be equal: the same numbers or named symbols. Generated names
   (``unk__0``) prove nothing, nor do names inside a body, where iterations may change the size.
3. A graph output keeps its name; if both values are graph outputs, both nodes stay.
4. Bodies of If, Loop and Scan are separate scopes: a node in a body does not merge with an outer node.

The following are never merged: operators that draw random numbers, even if only in training mode; BatchNormalization,
which updates its own statistics, and the nodes that compute its scratch tensors in training mode, because onnxruntime
overwrites these tensors; operators with bodies; and operators of unknown domains. A value with ``FAN_OUT`` readers gets
no more readers, because session creation time is quadratic in their number.

onnx-ir's own pass is not used: it merges Dropouts, operators of unknown domains, and attributes 0.0 and -0.0, skips
bodies, and misses points 1 and 2 for orders of inputs, constants and shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.builder import FAN_OUT
from gradgraph.graph.checks import DRAWING, has_bodies
from gradgraph.graph.marks import is_detached, is_marked_constant, precision_role
from gradgraph.graph.nodes import made_by
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.size_context import is_generated
from gradgraph.passes.normal.edit import graphs_of, replace_value

_DOMAINS = frozenset({"", "gradgraph", "com.microsoft.nchwc"})
_OWN_EFFECT = frozenset({*DRAWING, "Dropout", "BatchNormalization"})
_COMMUTE = frozenset({"Add", "And", "Equal", "Mul", "Or", "Xor"})
_PLAIN = frozenset(ir.AttributeType[f"{kind}{s}"] for kind in ("INT", "FLOAT", "STRING") for s in ("", "S"))
_MOST_ELEMENTS = 64  # maximum elements of a constant that is compared by value


Keys: TypeAlias = dict[ir.Node, tuple[Sequence[ir.Value | None], Hashable]]


def merge_equal(model: ir.Model, keys: Keys | None = None) -> ir.Model:
    """Merge common subexpressions in place, in one sweep over each graph in its order, and return ``model``.

    ``keys`` caches the keys of earlier sweeps with the nodes' inputs; attributes must not have changed since then.
    """
    keys = {} if keys is None else keys
    nodes_in = {graph: list(graph) for graph in graphs_of(model)}
    every = itertools.chain.from_iterable(nodes_in.values())
    scratch = {v for n in every if n.op_type == "BatchNormalization" for v in n.inputs[3:]}
    constants: dict[int, Hashable] = {}
    for graph, nodes in nodes_in.items():
        known: dict[Hashable, ir.Node] = {}
        gone: list[ir.Node] = []  # removed together: each removal scans all outputs of the graph
        for node in nodes:
            if not _is_pure(node) or not scratch.isdisjoint(node.outputs):
                continue
            key = _known_key(node, keys, constants, sizes_are_fixed=graph is model.graph)
            first = known.setdefault(key, node)
            if first is node:
                continue
            if _merge(node, first):
                gone.append(node)
            else:
                known[key] = node
        graph.remove(gone)
    return model


def _is_pure(node: ir.Node) -> bool:
    """Whether equal inputs of ``node`` always lead to equal outputs."""
    return node.domain in _DOMAINS and node.op_type not in _OWN_EFFECT and not has_bodies(node)


def _merge(node: ir.Node, first: ir.Node) -> bool:
    """Redirect the readers of ``node`` to ``first``, so that it can be removed; return False if it must stay."""
    pairs = list(zip(node.outputs, first.outputs, strict=True))
    if any((a.is_graph_output() and b.is_graph_output()) or len(b.uses()) >= FAN_OUT for a, b in pairs):
        return False
    for old, new in pairs:
        _take_over(old, new)
    node.resize_inputs(0)
    return True


def _take_over(old: ir.Value, new: ir.Value) -> None:
    """Replace ``old`` with ``new``.

    ``new`` takes the name of ``old`` if ``old`` is a graph output, or if ``new`` has no name.
    """
    takes_name, name = old.is_graph_output() or not new.name, old.name
    replace_value(old, new)
    if takes_name:
        old.name, new.name = None, name
        new.type, new.shape = old.type, old.shape


def name_outputs(model: ir.Model) -> ir.Model:
    """Remove each Identity that only names a graph output, and rename its input instead; return ``model``."""
    for graph in graphs_of(model):
        gone: list[ir.Node] = []
        for node in [made_by(v, "Identity") for v in graph.outputs]:
            source = None if node is None or is_detached(node) else node.inputs[0]
            maker = None if source is None else source.producer()
            if node is None or source is None or source.is_graph_output() or maker is None or maker.graph is not graph:
                continue
            _take_over(node.outputs[0], source)
            node.replace_input_with(0, None)
            gone.append(node)
        graph.remove(gone)
    return model


# --- equality of nodes ----------------------------------------------------------------------------------


def _known_key(node: ir.Node, keys: Keys, constants: dict[int, Hashable], sizes_are_fixed: bool) -> Hashable:
    """Return the cached key of ``node``; recomputed if inputs changed, and for a Shape, which depends on sizes.

    ``constants`` caches the keys of constants, by the id of the tensor.
    """
    inputs, key = keys.get(node, (None, None))
    if inputs is not node.inputs or node.op_type == "Shape":
        key = _node_key(node, constants, sizes_are_fixed)
        keys[node] = node.inputs, key
    return key


def _node_key(node: ir.Node, constants: dict[int, Hashable], sizes_are_fixed: bool) -> Hashable:
    if node.op_type == "Shape" and sizes_are_fixed and (dims := _named_sizes(node)) is not None:
        return "Shape", dims
    inputs = tuple([_operand_key(v, constants) for v in node.inputs])
    operands = frozenset(inputs) if node.op_type in _COMMUTE else inputs
    attributes = frozenset(map(_attribute_key, known.values())) if (known := node.attributes.data) else None
    kind: Hashable = "detached" if is_detached(node) else node.op_type
    if role := precision_role(node.op_type, node.metadata_props):
        kind = kind, role  # unlike an equal but unmarked Cast of the model itself
    return node.domain, kind, node.overload, len(node.outputs), attributes, operands


def _attribute_key(attribute: ir.Attr) -> Hashable:
    if attribute.type == ir.AttributeType.TENSOR:
        return attribute.name, _tensor_key(attribute.as_tensor())
    if attribute.type not in _PLAIN or attribute.is_ref():
        return attribute.name, id(attribute)
    return attribute.name, repr(attribute.value)  # 0.0 == -0.0, but their results differ


def _operand_key(value: ir.Value | None, constants: dict[int, Hashable]) -> Hashable:
    """Return the key of an input: the elements of a small constant; for any other value, the value itself."""
    tensor = None if value is None else value.const_value
    if value is None or tensor is None or not is_marked_constant(value):
        return value
    if (key := constants.get(id(tensor))) is None:
        key = constants[id(tensor)] = _tensor_key(tensor)
    return key


def _tensor_key(tensor: ir.TensorProtocol) -> Hashable:
    if tensor.size > _MOST_ELEMENTS or tensor.dtype == ir.DataType.STRING:
        return id(tensor)
    return int(tensor.dtype), tuple(tensor.shape.numpy()), tensor.tobytes()


def _named_sizes(node: ir.Node) -> shapes.Shape | None:
    """Return the sizes that a Shape node outputs, or None unless each is a number or a name that the model declares."""
    dims = shape_of(node.inputs[0])
    if dims is None:
        return None
    asked = dims[node.attributes.get_int("start", 0) : node.attributes.get_int("end")]
    known = all(d is not None and not is_generated(d) for d in asked)
    return asked if known else None

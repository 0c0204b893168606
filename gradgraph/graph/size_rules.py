"""Infer types and shapes with the rules of the package onnx-shape-inference, corrected where they are unsound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import onnx_ir as ir
from onnx_shape_inference import _broadcast, registry

from gradgraph.errors import ModelError
from gradgraph.graph import shapes
from gradgraph.graph.checks import WITH_BODIES, subgraphs
from gradgraph.graph.nodes import input_at
from gradgraph.graph.schemas import FIXED_TYPES, schema_of, signature
from gradgraph.graph.size_context import PLAIN, Context
from gradgraph.graph.size_rules_of_operators import OWN, enter, record_rank

_MOST_VECTOR = 4096
_ALIAS = "gradgraph.name"
_SYMBOL = ir.SymbolicDim

registry.collect()


def _broadcast_dim(a: Any, b: Any) -> Any:
    """Broadcast two sizes like the package, except that two different names give an unknown size: either may be 1."""
    if isinstance(a, int) and isinstance(b, int):
        return a if a == b or b == 1 else b if a == 1 else None
    if a == 1 or b == 1:
        return b if a == 1 else a
    if isinstance(a, int) or isinstance(b, int):
        return a if isinstance(a, int) else b
    return a if a.value is not None and a.value == b.value else _SYMBOL(None)


_broadcast._broadcast_dim = _broadcast_dim


class Rules(Context):
    """A run of shape and type inference."""

    def __init__(self, model: ir.Model | None = None, opset: int = shapes.OPSET) -> None:
        super().__init__(model, opset)
        self.failed: list[tuple[ir.Node, Exception]] = []

    def infer_model(self, model: ir.Model, every: bool = False) -> None:
        """Infer the outputs of all nodes; without ``every``, only of nodes with incompletely known outputs."""
        plain: dict[str, str] = {}  # aliases for names that the package would parse as formulas, or reject
        named = [v for v in (*values_of(model), *model.graph.initializers.values()) if not shapes.is_static(v.shape)]
        _rename(named, lambda name: name if PLAIN.fullmatch(name) else plain.setdefault(name, f"{_ALIAS}{len(plain)}"))
        overridable = {v: v.const_value for v in model.graph.initializers.values() if v.is_graph_input()}
        for value in overridable:
            value.const_value = None
        try:
            self._infer_graph(model.graph, every)
        finally:
            self.take_back()
            for value, tensor in overridable.items():
                value.const_value = tensor
            back = {alias: name for name, alias in plain.items()}
            _rename(values_of(model) if back else (), lambda name: back.get(name, name))
            _rename(named if back else (), lambda name: back.get(name, name))

    def take_back(self) -> None:
        """Remove the elements of computed values, which rules have read as constants."""
        for value in self.lent:
            value.const_value = None

    def _infer_graph(self, graph: ir.Graph, every: bool) -> None:
        for value in graph.inputs:
            self.name_anonymous_dims(value)
        for node in graph:
            if not every and _is_settled(node):
                continue
            if node.op_type in ("Loop", "Scan") and node.domain == "":
                self._attempt(enter, node)
            for body in subgraphs(node):
                self._infer_graph(body, every)
            for read in node.inputs:
                if read is not None and isinstance(read.type, ir.TensorType):  # elements of a sequence may differ
                    self.name_anonymous_dims(read)
            self.infer_node(node)

    def infer_node(self, node: ir.Node) -> None:
        """Record the types and shapes of the outputs of ``node`` as far as they follow from its inputs."""
        version = node.version or self.get_opset_version(node.domain)
        rule = (OWN.get(node.op_type) or registry.get("", node.op_type, version)) if node.domain == "" else None
        if node.domain == "":
            _set_types(node, version)
        if _is_long(node):
            pass
        elif rule is not None:
            self._attempt(rule, node)
        elif schema_of(node.op_type, version, node.domain) is not None:
            self._attempt(_by_onnx, node)
        if node.domain == "":
            record_rank(node)

    def _attempt(self, rule: Callable[[Rules, ir.Node], None], node: ir.Node) -> None:
        try:
            rule(self, node)
        except ModelError:
            raise  # raised by a rule that a user declared
        except Exception as error:  # rules may raise any error of NumPy or Python
            self.failed.append((node, error))


def _is_settled(node: ir.Node) -> bool:
    """Whether inference can add nothing: the outputs are fully known, and none is a small integer vector to track."""
    return node.op_type not in WITH_BODIES and all(
        v.type is not None and shapes.is_static(v.shape) and not (v.type.dtype.is_integer() and len(v.shape or ()) < 2)
        for v in node.outputs
    )


def _set_types(node: ir.Node, version: int) -> None:
    """Record the types of outputs that share a type variable with an input, or for which only one type is allowed."""
    declared = signature(node.op_type, version) if any(v.type is None for v in node.outputs) else None
    if declared is None:
        return
    given: dict[str | None, ir.TypeProtocol | None] = {}
    for i, value in enumerate(node.inputs):
        if value is not None and value.type is not None:
            variable = declared.formal(i, False).variable
            given[variable] = value.type if given.get(variable, value.type) == value.type else None  # they differ
    for i, out in enumerate(node.outputs):
        formal = declared.formal(i, True)
        dtype = FIXED_TYPES.get(min(formal.allowed)) if len(formal.allowed) == 1 else None
        if out.type is None and out.name != "":
            out.type = ir.TensorType(dtype) if dtype else given.get(formal.variable) if formal.variable else None


_SIZES = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0, "Tile": 1}


def _is_long(node: ir.Node) -> bool:
    """Whether the package's rules would enumerate a huge number of elements or outputs, more than the file contains."""
    if node.op_type in _SIZES:
        sizes = shapes.recorded_shape(input_at(node, _SIZES[node.op_type]))
        return any(length > _MOST_VECTOR for length in shapes.known_sizes(sizes))
    return node.op_type == "Split" and node.attributes.get_int("num_outputs", 0) > _MOST_VECTOR


def _rename(values: Iterable[ir.Value], new_name: Callable[[str], str]) -> None:
    for value in values:
        old = shapes.recorded_shape(value) or ()
        new = tuple(new_name(d) if isinstance(d, str) else d for d in old)
        if new != old:
            value.shape = ir.Shape(new)


def values_of(model: ir.Model) -> Iterator[ir.Value]:
    """Yield the inputs and all computed values of ``model`` and its subgraphs."""
    stack = [model.graph]
    while stack:
        graph = stack.pop()
        yield from graph.inputs
        for node in graph:
            yield from node.outputs
            if node.attributes.data:
                stack.extend(subgraphs(node))


def _by_onnx(rules: Rules, node: ir.Node) -> None:
    """Infer a node by its ONNX schema, for operators without a rule, such as those that a user declared."""
    if any(v is not None and v.type is None for v in node.inputs):
        return
    version, given = node.version or rules.get_opset_version(node.domain), map(shapes.recorded_shape, node.inputs)
    found = shapes.types_by_schema(node, list(given), version, lambda _: {})
    for out in node.outputs:
        if out.name in found:
            kind = found[out.name]
            out.type = out.type or ir.serde.deserialize_type_proto_for_type(kind)
            if (shape := shapes.shape_of_type(kind)) is not None:
                rules.record(out, shape)

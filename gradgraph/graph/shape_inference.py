"""Shapes of graph values, inferred on demand, one node at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from gradgraph.graph.shapes import Shape, as_dims, broadcast, is_elementwise, operands, record_shape, recorded_shape
from gradgraph.graph.size_rules import Rules

_ASKED = "gradgraph.shape_asked"  # Value.meta key: inference was tried and need not be repeated


def shape_of(value: ir.Value | None) -> Shape | None:
    """Return the recorded shape of ``value``, or the shape inferred through its producers, or None if unknown."""
    if value is None:
        return None
    if value.shape is None and value.producer() is not None and _ASKED not in value.meta:
        _infer_back(value)
    return None if (shape := value.shape) is None else as_dims(shape)


def reset_inference(values: Iterable[ir.Value]) -> None:
    """Allow ``shape_of`` to retry failed inference for ``values`` whose node now has an input of known shape."""
    for value in values:
        node = value.producer()
        read = [v for v in node.inputs if v is not None and not v.is_initializer()] if node is not None else []
        if any(v.shape is not None for v in read):
            value.meta.pop(_ASKED, None)


@contextlib.contextmanager
def assumptions(values: Iterable[ir.Value]) -> Iterator[None]:
    """Return a context in which the shapes of ``values`` may be changed; its end restores the recorded shapes."""
    before = [(v, v.shape, _ASKED in v.meta) for v in values]
    try:
        yield
    finally:
        for value, shape, asked in before:
            value.shape = shape
            if not asked:
                value.meta.pop(_ASKED, None)


def source_of_open_rank(value: ir.Value) -> ir.Value:
    """Return the value at which the unknown rank of ``value`` originates, found by walking back."""
    before: ir.Value | None = value
    while before is not None:
        value, node = before, before.producer()
        read = [_measured(v) for v in node.inputs if v is not None] if node is not None else []
        before = next((v for v in read if shape_of(v) is None), None)
    return value


def _measured(value: ir.Value) -> ir.Value:
    """Return the tensor ``x`` if ``value`` is the result of ``Shape(x)``; otherwise ``value``."""
    node = value.producer()
    return node.inputs[0] or value if node is not None and node.op_type == "Shape" else value


def _infer_back(value: ir.Value) -> None:
    """Infer the shape of ``value``, after those of all preceding values of unknown shape, without recursion."""
    stack = [value.producer()]
    while stack:
        node = stack[-1]
        assert node is not None
        waiting = [
            v.producer()
            for v in node.inputs
            if v is not None and v.shape is None and v.producer() is not None and _ASKED not in v.meta
        ]
        if waiting:
            stack.extend(waiting)
            continue
        stack.pop()
        infer_node(node)


def infer_node(node: ir.Node) -> None:
    """Record the output shapes and missing element types of a node, by ONNX's rules and then by our own."""
    for out in node.outputs:
        out.meta[_ASKED] = True
    if is_elementwise(node):
        shape = broadcast(*[recorded_shape(v) for v in operands(node)])
        record_shape(node.outputs[0], shape)
        return
    if all(v is None or v.type is not None for v in node.inputs):
        Rules().infer_node(node)


def infer_nodes(nodes: Iterable[ir.Node], opset: int) -> None:
    """Record types and shapes of the outputs of ``nodes``, in topological order; ``opset`` is their default version."""
    rules = Rules(opset=opset)
    for node in nodes:
        if not node.domain and all(v is None or v.type is not None for v in node.inputs):
            rules.infer_node(node)
    rules.take_back()

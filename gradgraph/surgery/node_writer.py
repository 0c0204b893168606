"""A writer of several nodes that are inserted into a graph together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.passes.normal.edit import graph_of
from gradgraph.surgery.operation import free_name


class NodeWriter:
    """A writer of nodes, which ``place_before`` or ``place_behind`` then inserts into the graph.

    Args:
        scope: prefix of node names.
        metadata: metadata of each node.
    """

    def __init__(self, work: ir.Model, scope: str, metadata: Mapping[str, str] | None = None) -> None:
        self.work, self._scope, self._metadata = work, scope, metadata or {}
        self._nodes: list[ir.Node] = []

    def node(self, op_type: str, *inputs: ir.Value, domain: str = "", **attributes: Any) -> ir.Value:
        """Write a node and return its first output; attributes are ``ir.Attr`` or plain values."""
        name = free_name(self.work, f"{self._scope}/{op_type}_{len(self._nodes)}")
        given = [v if isinstance(v, ir.Attr) else ir.convenience.convert_attribute(k, v) for k, v in attributes.items()]
        made = ir.Node(domain, op_type, inputs, given, name=name)
        made.outputs[0].name = name
        made.metadata_props.update(self._metadata)
        self._nodes.append(made)
        return made.outputs[0]

    def constant(self, numbers: Any, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        """Write a Constant, for values that are not weights, and return its output."""
        tensor = ir.tensor(np.array(numbers, dtype.numpy()))
        value = self.node("Constant", value=ir.AttrTensor("value", tensor))
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(tensor.shape.numpy())
        return value

    def whole(self, *numbers: int) -> ir.Value:
        """Write a Constant of int64 [n], such as sizes or axes, and return its output."""
        return self.constant(list(numbers), ir.DataType.INT64)

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        return self.node("Cast", x, to=int(dtype))

    def reduced(self, op_type: str, x: ir.Value, axes: list[int], since: int) -> ir.Value:
        """Write a reduction that drops ``axes``, an input from opset ``since`` on; return its output."""
        if self.work.opset_imports.get("", 21) >= since:
            return self.node(op_type, x, self.whole(*axes), keepdims=0)
        return self.node(op_type, x, axes=axes, keepdims=0)

    def place_before(self, node: ir.Node) -> None:
        graph_of(node).insert_before(node, self._taken())

    def place_behind(self, node: ir.Node) -> None:
        graph_of(node).insert_after(node, self._taken())

    def _taken(self) -> list[ir.Node]:
        nodes, self._nodes = self._nodes, []
        return nodes

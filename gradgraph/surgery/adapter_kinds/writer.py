"""Writing of nodes around a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.surgery.adapter_kinds.adapter import DEFAULT, Adapter
from gradgraph.surgery.operated import add_weight, free_name, numbers_of


class Writer:
    """Writes nodes for the adapter of one layer; they are placed behind ``node``, or before it.

    Attributes:
        work: the model.
        node: the layer's.
        dtype: of the numbers that it computes with.
    """

    def __init__(self, work: ir.Model, node: ir.Node, adapter: Adapter, dtype: ir.DataType) -> None:
        self.work, self.node_of_layer, self.adapter, self.dtype = work, node, adapter, dtype
        self._nodes: list[ir.Node] = []

    def weight(self, part: str, numbers: np.ndarray) -> ir.Value:
        """A trained tensor, called ``module.part``, or ``module.part.name`` of an adapter that has a name."""
        suffix = "" if self.adapter.name == DEFAULT else f".{self.adapter.name}"
        return add_weight(self.work, f"{self.adapter.module}.{part}{suffix}", numbers.astype(self.dtype.numpy()))

    def node(self, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """The result of a new node; attributes are ``ir.Attr`` or plain numbers."""
        name = free_name(self.work, f"{self.adapter.module}/adapter/{op_type}_{len(self._nodes)}")
        given = [v if isinstance(v, ir.Attr) else ir.convenience.convert_attribute(k, v) for k, v in attributes.items()]
        made = ir.Node("", op_type, inputs, given, name=name)
        made.outputs[0].name = name
        made.metadata_props.update(self.node_of_layer.metadata_props)
        self._nodes.append(made)
        return made.outputs[0]

    def constant(self, numbers: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """Numbers of the formula, which are no weight."""
        tensor = ir.tensor(np.array(numbers, (dtype or self.dtype).numpy()))
        return self.node("Constant", value=ir.AttrTensor("value", tensor))

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        return self.node("Cast", x, to=int(dtype))

    def sum(self, x: ir.Value) -> ir.Value:
        """Over the first axis."""
        if self.work.opset_imports.get("", 21) >= 13:
            return self.node("ReduceSum", x, self.whole(0), keepdims=0)
        return self.node("ReduceSum", x, axes=[0], keepdims=0)

    def whole(self, *numbers: int) -> ir.Value:
        """Whole numbers [n], such as sizes and axes."""
        return self.constant(list(numbers), ir.DataType.INT64)

    def instead(self, old: ir.Value, write: Callable[[ir.Value], ir.Value]) -> str:
        """Let what ``write`` makes of a result be read in its place; its name."""
        readers = list(old.uses())
        new = write(old)
        new.type, new.shape = old.type, old.shape
        for reader, position in readers:
            reader.replace_input_with(position, new)
        graph = self.work.graph
        if old.is_graph_output():
            new.name, old.name = old.name, free_name(self.work, f"{old.name}.base")
            graph.outputs[:] = [new if v is old else v for v in graph.outputs]
        producer = old.producer()
        assert producer is not None
        graph.insert_after(producer, self._taken())
        return new.name or ""

    def before(self, node: ir.Node, position: int, new: ir.Value | None) -> None:
        """Let ``node`` read ``new``, which has been written, as this input."""
        if len(node.inputs) <= position:
            node.resize_inputs(position + 1)
        node.replace_input_with(position, new)
        self.place_before(node)

    def declare(self, node: ir.Node, outputs: int) -> None:
        """Let ``node`` give so many results, also if nobody reads the last ones."""
        node.resize_outputs(max(outputs, len(node.outputs)))
        for i, value in enumerate(node.outputs):
            if not value.name:
                value.name = free_name(self.work, f"{self.adapter.module}/adapter/output_{i}")

    def place_before(self, node: ir.Node) -> None:
        self.work.graph.insert_before(node, self._taken())

    def place_behind(self, node: ir.Node) -> None:
        self.work.graph.insert_after(node, self._taken())

    def _taken(self) -> list[ir.Node]:
        nodes, self._nodes = self._nodes, []
        return nodes


def behind_bias(layer: ir.Node) -> ir.Value:
    """What a layer gives, with the bias that an Add behind it alone adds."""
    result = layer.outputs[0]
    uses = list(result.uses())
    if len(uses) != 1 or result.is_graph_output() or uses[0].node.op_type != "Add" or uses[0].node.domain:
        return result
    add = uses[0].node
    other = numbers_of(add.inputs[1 - uses[0].idx])
    return add.outputs[0] if other is not None and other.shape.rank() == 1 else result

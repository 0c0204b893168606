"""Writer of nodes around a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.files.model_metadata import DEFAULT, Adapter
from gradgraph.surgery.node_writer import NodeWriter
from gradgraph.surgery.operation import add_weight, free_name


class Writer(NodeWriter):
    """A writer of nodes for the adapter of one layer.

    Attributes:
        dtype: the type of the adapter's tensors and computation.
    """

    def __init__(self, work: ir.Model, node: ir.Node, adapter: Adapter, dtype: ir.DataType) -> None:
        super().__init__(work, f"{adapter.module}/adapter", node.metadata_props)
        self.adapter, self.dtype = adapter, dtype

    def weight(self, part: str, numbers: np.ndarray) -> ir.Value:
        """Add a trained tensor called ``module.part``, or ``module.part.name`` for a named adapter; return it."""
        suffix = "" if self.adapter.name == DEFAULT else f".{self.adapter.name}"
        return add_weight(self.work, f"{self.adapter.module}.{part}{suffix}", numbers.astype(self.dtype.numpy()))

    def constant(self, numbers: Any, dtype: ir.DataType | None = None) -> ir.Value:
        return super().constant(numbers, dtype or self.dtype)

    def instead(self, old: ir.Value, write: Callable[[ir.Value], ir.Value]) -> str:
        """Replace all uses of ``old`` with ``write(old)``, whose nodes are inserted after it; return the new name."""
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
        self.place_behind(producer)
        return new.name or ""

    def before(self, node: ir.Node, position: int, new: ir.Value | None) -> None:
        """Set input ``position`` of ``node`` to ``new``, and insert the written nodes before ``node``."""
        if len(node.inputs) <= position:
            node.resize_inputs(position + 1)
        node.replace_input_with(position, new)
        self.place_before(node)

    def declare(self, node: ir.Node, outputs: int) -> None:
        """Give ``node`` at least ``outputs`` named outputs, even if the last ones are unused."""
        node.resize_outputs(max(outputs, len(node.outputs)))
        for i, value in enumerate(node.outputs):
            if not value.name:
                value.name = free_name(self.work, f"{self.adapter.module}/adapter/output_{i}")

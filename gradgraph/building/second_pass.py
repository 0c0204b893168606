"""A second forward pass in a training step, with other weights, for gradients at those weights (SAM)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from gradgraph.graph.builder import Builder


class SecondPass:
    """A second forward pass: a copy of ``graph``, which must contain only the forward pass and the loss."""

    def __init__(self, graph: ir.Graph, loss: ir.Value) -> None:
        self._graph = graph
        self._copy = graph.clone(allow_outer_scope_values=True)
        computed = {v.name: v for node in self._copy for v in node.outputs}
        self._loss = computed[loss.name]
        self._copy.outputs.clear()

    def write(self, op: Builder, moved: Mapping[ir.Value, ir.Value]) -> ir.Value:
        """Append the copy to the graph, with weights replaced by the values in ``moved``; return its loss."""
        originals = {v.name: v for v in (*self._graph.inputs, *self._graph.initializers.values())}
        copies: Sequence[ir.Value] = (*self._copy.inputs, *self._copy.initializers.values())
        for value in copies:
            original = originals[value.name]
            value.replace_all_uses_with(moved.get(original, original))
        nodes = list(self._copy)
        self._copy.remove(nodes)
        for node in nodes:
            node.name = op.fresh(node.name or node.op_type)
            for output in node.outputs:
                if output.name:
                    output.name = op.fresh(output.name)
        self._graph.extend(nodes)
        return self._loss

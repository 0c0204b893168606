"""Writing of init.onnx, which outputs the initial value of every state tensor."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.prune import prune
from gradgraph.graph.shapes import IR_VERSION, OPSET


class InitModel:
    """The writer of init.onnx. State tensors that several train graphs share are written once.

    Attributes:
        op: the builder of the nodes of init.onnx.
    """

    def __init__(self) -> None:
        self.op = Builder(scope="init")
        self._weights: dict[str, ir.Value] = {}
        self._values: dict[str, ir.Value] = {}

    def weight(self, value: ir.Value) -> Var:
        """Return the initial value of a weight, as an initializer of init.onnx."""
        name = value.name or ""
        if name not in self._weights:
            self._weights[name] = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
        return self.op.wrap(self._weights[name])

    def add(self, value: ir.Value, begin: Var) -> None:
        """Initialise the state tensor ``value`` to ``begin``."""
        name = value.name or ""
        if name not in self._values:
            is_weight = begin.value.name in self._weights
            self._values[name] = begin.value if is_weight else owned(self.op, begin, name, value, self._values.values())

    def model(self) -> ir.Model:
        """Return the finished init.onnx."""
        graph = ir.Graph((), [*self._values.values()], nodes=(), name="init", opset_imports={"": OPSET})
        for weight in self._weights.values():
            graph.register_initializer(weight)
        self.op.finish(graph)
        return prune(ir.Model(graph, ir_version=IR_VERSION, producer_name="gradgraph"))


def owned(op: Builder, var: Var, name: str, like: ir.Value, taken: Collection[ir.Value]) -> ir.Value:
    """Return ``var`` as a separate value named ``name``, with the type and shape of ``like``.

    If ``op`` did not write ``var``, or if it is in ``taken``, an Identity node copies it; otherwise it is renamed.
    """
    node = var.value.producer()
    if node is None or node.graph is not None or var.value in taken:
        var = op.Identity(var, name=name)
    else:
        var.value.name = op.fresh(name)
    var.value.type, var.value.shape = like.type, like.shape
    return var.value

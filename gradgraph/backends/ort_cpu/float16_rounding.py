"""Rewrite: compute a mixed-precision step in float32, rounding results to float16.

onnxruntime's CPU provider has no float16 kernels on most processors. It computes such operators in float32 and drops
the roundings between them, so that nothing overflows or underflows as in real float16; and none of our forms apply to
float16 nodes. Here, each rounding is a Cast to float16 and one back, which onnxruntime keeps:

1. an operator reads float32 copies of its float16 inputs, one copy per tensor;
2. its result is float32 and rounded by a Cast, unless the operator only moves data, which are already rounded.

Existing Casts stay, and so do float16 values at the boundaries of bodies.
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.autodiff.path import is_tensor
from gradgraph.graph.builder import Builder
from gradgraph.graph.checks import has_bodies
from gradgraph.passes.autocast import METADATA_KEY, MOVES
from gradgraph.passes.normal.edit import graph_of, graphs_of, names_of, replace_value
from gradgraph.passes.normal.spelling.precision import retype_attributes
from gradgraph.rules.registry import key_of

NARROW, WIDE = ir.DataType.FLOAT16, ir.DataType.FLOAT


def round_in_between(model: ir.Model) -> bool:
    """Apply the rewrite to a mixed-precision step, in place; return whether there was float16 computation."""
    if model.metadata_props.get(METADATA_KEY) != NARROW.name.lower():
        return False
    return _Rounding(model).run()


class _Rounding:
    def __init__(self, model: ir.Model) -> None:
        self.model, self.op = model, Builder(names_of(model))
        self.copies: dict[ir.Value, ir.Value] = {}  # float16 value -> the same in float32

    def run(self) -> bool:
        """Make every node that reads or writes float16 compute float32; return whether any node did."""
        nodes = [n for graph in graphs_of(self.model) for n in graph if not has_bodies(n) and key_of(n) != ("", "Cast")]
        found = [n for n in nodes if any(v is not None and _is_narrow(v) for v in (*n.inputs, *n.outputs))]
        for node in found:
            self._widen(node)
        return bool(found)

    def _widen(self, node: ir.Node) -> None:
        """Make ``node`` read and compute float32, and round its result."""
        for i, value in enumerate(node.inputs):
            if value is not None and _is_narrow(value):
                node.replace_input_with(i, self._widened(value))
        retype_attributes(node, NARROW, "dtype", "stash_type")
        for computed in node.outputs:
            if computed.name and _is_narrow(computed):
                self._insert_rounding(node, computed)

    def _insert_rounding(self, node: ir.Node, computed: ir.Value) -> None:
        """Make all readers of ``computed``, which becomes float32, read a float16 Cast of it."""
        rounded = ir.Value(name=computed.name, type=ir.TensorType(NARROW), shape=computed.shape)
        replace_value(computed, rounded)
        computed.name, computed.type = self.op.fresh(f"{computed.name}.exact"), ir.TensorType(WIDE)
        cast = ir.Node("", "Cast", [computed], [ir.AttrInt64("to", int(NARROW))], outputs=[rounded])
        graph_of(node).insert_after(node, [cast])
        if node.op_type in MOVES and node.domain == "":
            self.copies[rounded] = computed

    def _widened(self, value: ir.Value) -> ir.Value:
        """Return ``value`` in float32, computed in the same graph, so that every body can read it."""
        if value not in self.copies:
            cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(WIDE))])
            wide = cast.outputs[0]
            wide.name, wide.type, wide.shape = self.op.fresh(f"{value.name}.wide"), ir.TensorType(WIDE), value.shape
            producer = value.producer()
            if producer is not None:
                graph_of(producer).insert_after(producer, [cast])
            else:
                home = self.model.graph if value.graph is None else value.graph
                assert isinstance(home, ir.Graph)
                first = next(iter(home))
                home.insert_before(first, [cast])
            self.copies[value] = wide
        return self.copies[value]


def _is_narrow(value: ir.Value) -> bool:
    return value.dtype == NARROW and is_tensor(value)

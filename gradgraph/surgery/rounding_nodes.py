"""The nodes that round: a QuantizeLinear and a DequantizeLinear, and the scale that both read.

A scale that learns is ``first·exp(range)`` of a trained number that begins as 0: positive whatever an optimizer does,
and a step of Adam changes each by the same part of itself, however small it is (as in TQT, Jain et al. 2020,
arXiv:1903.08066). Its gradient: see ``gradgraph.passes.normal.spelling.fake_quantization``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.graph.marks import LEARNED, QUANTISED
from gradgraph.surgery.operated import add_weight, free_name

SMALLEST = 1e-8  # a scale: of a channel of zeros, too


class Writer:
    """Writes nodes before ``place``, named after the layer they are for."""

    def __init__(self, work: ir.Model, place: ir.Node, layer: str) -> None:
        self.work, self.layer, self._place, self._nodes = work, layer, place, list[ir.Node]()

    def node(self, op_type: str, *inputs: ir.Value, domain: str = "", **attributes: int) -> ir.Value:
        return self._write(op_type, inputs, [ir.AttrInt64(k, v) for k, v in attributes.items()], domain)

    def constant(self, data: np.ndarray, kind: ir.DataType | None = None) -> ir.Value:
        value = self._write("Constant", [], [ir.AttrTensor("value", ir.tensor(data, dtype=kind))])
        value.type, value.shape = ir.TensorType(kind or ir.DataType.from_numpy(data.dtype)), ir.Shape(data.shape)
        return value

    def number(self, value: float) -> ir.Value:
        return self.constant(np.array(value, np.float32))

    def largest(self, x: ir.Value, axes: Sequence[int]) -> ir.Value:
        """The largest |x| over these axes."""
        size = self.node("Abs", x)
        if self.work.opset_imports.get("", 21) >= 18:
            return self.node("ReduceMax", size, self.constant(np.array(axes, np.int64)), keepdims=0)
        return self._write("ReduceMax", [size], [ir.AttrInt64s("axes", axes), ir.AttrInt64("keepdims", 0)])

    def learned(self, first: np.ndarray, name: str) -> ir.Value:
        """A scale that is trained, from ``first`` on, by a weight called ``name``."""
        begin = self.constant(np.asarray(first, np.float32))
        scale = self.node("Mul", begin, self.node("Exp", self._range(first, name)))
        scale.type, scale.shape = begin.type, begin.shape
        return scale

    def _range(self, first: np.ndarray, name: str) -> ir.Value:
        value = add_weight(self.work, name, np.zeros(np.shape(first), np.float32))
        described = json.loads(self.work.metadata_props.get(QUANTISED, "{}"))
        described[LEARNED] = [*described.get(LEARNED, []), value.name]
        self.work.metadata_props[QUANTISED] = json.dumps(described)
        return value

    def cast(self, x: ir.Value, kind: ir.DataType) -> ir.Value:
        return self.node("Cast", x, to=int(kind))

    def pair(self, x: ir.Value, scale: ir.Value, zero: ir.Value, **axis: int) -> tuple[ir.Value, ir.Value]:
        """The integers and the rounded numbers."""
        integers = self.node("QuantizeLinear", x, scale, zero, domain="", **axis)
        return integers, self.node("DequantizeLinear", integers, scale, zero, domain="", **axis)

    def place(self) -> None:
        graph = self._place.graph
        assert isinstance(graph, ir.Graph)
        graph.insert_before(self._place, self._nodes)
        self._nodes = []

    def _write(self, op_type: str, inputs: Sequence[ir.Value], attrs: Sequence[ir.Attr], domain: str = "") -> ir.Value:
        name = free_name(self.work, f"{self.layer}/quantise/{op_type}_{len(self._nodes)}")
        made = ir.Node(domain, op_type, inputs, attrs, name=name)
        made.outputs[0].name = name
        self._nodes.append(made)
        return made.outputs[0]
